"""Policies of serving: which requests form a batch, where and when it runs; the same for simulator and server.

    adaptive    Meshwright's own: deferred batches whose settings adapt to the arrivals
    deferred    eager batches, Symphony's deferred ones, and intermediate settings
    sharding    Symphony's policy on several cores: shards of models ask a central thread (rank) for devices
    nexus       a packing for an epoch (`packing`): requests are split by it, devices serve their models in turn
    clockwork   one controller that plans each device's next batch and which models it holds (`residency`)
    shepherd    the largest batch first, and preemption
    named       batching without deadlines (timeouts, learned limits), and the list of all policies

`autoscaling` decides how many devices are wanted, under any policy.

`hooks` defines the interface of a policy, `pool` the state that it reads and changes, `queues` operations on the state.
"""
