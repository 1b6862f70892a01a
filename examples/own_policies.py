"""A policy of our own: as eager as can be, but never batches of more than a third of what is possible."""


class Careful:
    """Run what there is on any idle device, the most urgent queue first."""

    def arrive(self, pool, now, queue, request, deadline):
        if deadline - pool.slack < now + pool.delay + pool.latency(queue, 1):
            pool.refuse(queue, request)
        elif pool.enter(queue, request, deadline) and pool.idle_devices:
            self.free(pool, now, pool.idle_devices[0])

    def free(self, pool, now, device):
        for queue in range(pool.num_queues):
            while pool.length(queue) and pool.deadline(queue) < now + pool.delay + pool.latency(queue, 1):
                pool.drop(queue, 1)
        waiting = [queue for queue in range(pool.num_queues) if pool.length(queue)]
        if waiting:
            queue = min(waiting, key=pool.deadline)
            room = pool.deadline(queue) - now - pool.delay
            count = min(pool.length(queue), max(pool.largest(queue) // 3, 1))
            while pool.latency(queue, count) > room:
                count -= 1
            pool.run(queue, count, device)
