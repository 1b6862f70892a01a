"""Policies of serving: which requests run together, where and when; the same compiled functions, simulated and live.

    adaptive    Meshwright's own: deferred batches whose settings adapt to the arrivals
    deferred    eager batches, Symphony's deferred ones, and intermediate settings
    sharding    Symphony's over several cores: shards of models, and a rank that grants the devices
    nexus       a packing for an epoch (`packing`): requests are split by it, devices serve their models in turn
    clockwork   one controller that plans each device's next batch and which models it holds (`residency`)
    shepherd    the largest batch first, and preemption
    named       batching without deadlines (timeouts, learned limits), and the list of all policies

`autoscaling` decides how many devices are wanted, under any policy.

`hooks` defines a policy, `pool` what it sees, `queues` what it can do.
"""
