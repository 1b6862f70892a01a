"""Symphony's scheduler in parts: models are divided among shards, and one rank grants the devices.

    mailboxes   rows of integers from one part to another, without locks
    policy      a shard (the queues of some models: their candidates, and the batches on granted devices), the rank (the
                devices, and the candidates of all queues: which queue is granted which device), and all parts in one
                thread, as a policy of the simulator

In Symphony (arXiv 2308.07470) they are ModelThreads and the RankThread. Each part has its own pool and changes nothing
else; what it knows of another part has arrived as a message, a row of `mailboxes.WIDTH` integers that starts with its
kind, a moment (ns), and the number of a queue in its shard:

    CANDIDATE   queue, begin, end, size, deadline, lost   shard to rank: the batch that could run next (size 0: none),
                                                          the window for its start, when its first request must be done,
                                                          and how many requests were dropped as late since the last
                                                          message
    GRANT       queue, device, slowness, typical, up,     rank to shard: run a batch on this device, which is idle; its
                hoped                                     slowness, the typical slowness, the number of devices, and
                                                          the least slowness that can be hoped for
    TAKEN       queue, device, begin, end                 shard to rank: a batch runs there
    UNUSED      queue, device                             shard to rank: nothing could be in time there; it is idle

External events arrive as such rows, too:

    ARRIVE      queue, request, deadline                  to a shard: a request has arrived
    FREE        -, device                                 to the rank: it has come up, or has ended its batch
    WAKE                                                  to either: a moment has come that it asked for

The decisions of a part depend only on the rows that it took, in their order.
"""

ARRIVE, CANDIDATE, GRANT, TAKEN, UNUSED, FREE, WAKE = range(7)
