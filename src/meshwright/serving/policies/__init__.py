"""Policies of serving: which requests run together, where and when; the same compiled functions simulated and live.

    adaptive    Meshwright's own: deferred batches whose settings follow what arrives
    deferred    eager batches, Symphony's deferred ones, and what lies between
    sharding    Symphony's over several cores: shards of models, and one that gives the devices away
    nexus       a packing for an epoch (`packing`), dealt out by fronts, run in rounds by devices
    clockwork   one controller that plans what every device does next, and which models it holds (`residency`)
    shepherd    the largest batch first, and preemption
    fixed       batching that never looks at deadlines: timeouts, and limits that are learned

How many devices are wanted says `scaling`, for all of them.

What a policy is stands in `hooks`, what it sees in `pool`, what it may do in `queues`, which there are in `named`.
"""
