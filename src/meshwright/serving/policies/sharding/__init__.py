"""Symphony's scheduler in several parts: shards, each with the queues of some models, and the rank, with all devices.

The **rank** decides which queue gets an idle device (it grants the device); it is not a rank of torch.distributed. A
**shard** makes the batches for granted devices. In Symphony (arXiv 2308.07470) the parts are threads: ModelThreads and
the RankThread.

    mailboxes   rows of integers from one part to another, without locks
    policy      the functions of a shard, those of the rank, and all parts in one thread, as a policy of the simulator

Each part reads and changes only its own pool. Parts exchange messages, rows of `mailboxes.WIDTH` integers that start
with a kind, a time (ns), and the number of a queue in its shard:

    CANDIDATE   queue, begin, end, size, deadline, lost   shard to rank: the batch that could run next (size 0: the
                                                          queue is empty), the window for its start, when its first
                                                          request must be done, and how many requests were dropped as
                                                          late since the last message
    GRANT       queue, device, slowness, typical, up,     rank to shard: run a batch on this device, which is idle; its
                hoped                                     slowness, the typical slowness, the number of devices that are
                                                          up, and the slowness to assume for the first request
    TAKEN       queue, device, begin, end                 shard to rank: a batch runs on the granted device
    UNUSED      queue, device                             shard to rank: no request could be in time on the granted
                                                          device; it is idle

External events arrive as such rows, too:

    ARRIVE      queue, request, deadline                  to a shard: a request has arrived
    FREE        -, device                                 to the rank: a device has come up, or has ended its batch
    WAKE                                                  to either: a moment has come that the part asked for

The decisions of a part depend only on the rows that it has received, in their order.
"""

ARRIVE, CANDIDATE, GRANT, TAKEN, UNUSED, FREE, WAKE = range(7)
