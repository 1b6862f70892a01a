"""Pipelines followed by hand: the oracle of simulated programs."""


def follow_1f1b(stages, num_microbatches):
    """Seconds of 1F1B; messages take no time."""
    last = len(stages) - 1
    orders = []
    for rank in range(len(stages)):
        warm_up = min(last - rank, num_microbatches)
        order = [("f", i) for i in range(warm_up)]
        for i in range(num_microbatches - warm_up):
            order += [("f", warm_up + i), ("b", i)]
        orders.append(order + [("b", i) for i in range(num_microbatches - warm_up, num_microbatches)])
    done, clock = {}, [0.0] * len(stages)
    while any(orders):
        for rank, order in enumerate(orders):
            if not order:
                continue
            what, i = order[0]
            before = (rank - 1, "f", i) if what == "f" else (rank + 1, "b", i) if rank < last else (rank, "f", i)
            needed = 0.0 if before[0] < 0 else done.get(before)
            if needed is None:
                continue
            stage = stages[rank]
            took = stage.forward_s if what == "f" else stage.input_gradient_s + stage.weight_gradient_s
            clock[rank] = done[rank, what, i] = max(clock[rank], needed) + took
            order.pop(0)
    return max(clock)
