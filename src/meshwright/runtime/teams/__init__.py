"""Plans that split ops: one rank of the plan is a team of neighbouring processes, which share the work of each op.

grid            the place of a process in its team, and the processes that it exchanges with
shares          a process's shard of a tensor, and the whole tensor from all shards
team_operators  the ops that the sharding added, as autograd functions over process groups; ops that compute a shard in
                another way than the whole; tokens on their way to the processes that have their experts, and back
local_parts     a stage's module as one process of a team computes it
"""
