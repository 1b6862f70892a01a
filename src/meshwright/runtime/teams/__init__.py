"""Tensor, context and expert parallelism: each rank of the plan is a team of processes that split the ops.

grid            the position of a process in its team, and its process groups
shares          a process's shard of a tensor, and the whole tensor from all shards
team_operators  the collectives that the sharding added, as autograd functions; ops whose shard needs another
                computation than the whole op; dispatch of tokens to experts
local_parts     the model of one process of a team
"""
