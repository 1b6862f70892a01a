"""Symphony's scheduler in parts: models are dealt out to shards, and one rank gives the devices away.

    mailboxes   rows of integers from one part to another, without locks
    shard       the queues of some models: what each could run next, and what it runs on a device that it is granted
    rank        the devices, and what each queue could run next: who is granted which device
    policy      all parts in one thread, as a policy of the simulator

In Symphony (arXiv 2308.07470) they are ModelThreads and the RankThread. Each part has a pool of its own and
changes nothing else; what one knows of another has come as a message, a row of `mailboxes.WIDTH` integers that begins
with its kind, a moment (ns), and the number of a queue in its shard:

    CANDIDATE   queue, begin, end, size, deadline, lost   shard to rank: what could run next (size 0: nothing) from when
                                                          to when, by when its first request has to be done, and how
                                                          many requests were dropped as late since the last message
    GRANT       queue, device, slowness, typical, up,     rank to shard: run what you can on this device, which is idle;
                hoped                                     how slow it is, how slow devices typically are, how many, and
                                                          how slow the fastest is at least that can be hoped for
    TAKEN       queue, device, begin, end                 shard to rank: a batch runs there
    UNUSED      queue, device                             shard to rank: nothing could be in time there; it is idle

What happens outside comes as such rows, too:

    ARRIVE      queue, request, deadline                  to a shard: a request has come
    FREE        -, device                                 to the rank: it has come up, or has ended its batch
    WAKE                                                  to either: a moment has come that it asked for

A part decides by the rows that it took, in their order, and nothing else.
"""

ARRIVE, CANDIDATE, GRANT, TAKEN, UNUSED, FREE, WAKE = range(7)
