"""The action lists of torch's own schedules, made without ranks: stages are stand-ins."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import torch.distributed.pipelining.schedules as schedules

_CLASSES = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "looped-bfs": schedules.ScheduleLoopedBFS,
    "zb-v": schedules.ScheduleZBVZeroBubble,
    "dualpipe-v": schedules.ScheduleDualPipeV,
}


def torch_actions(schedule: str, positions: int, count: int, chunks: int) -> list[list[str]]:
    """Per rank, actions such as ``0F3``; pairs that run together are written one after the other."""
    own = _CLASSES[schedule]
    single = schedule in ("gpipe", "1f1b")
    chunks = 1 if single else 2 if schedule in ("zb-v", "dualpipe-v") else chunks
    facts = SimpleNamespace(
        _n_microbatches=count,
        _num_stages=chunks * positions,
        num_stages=chunks * positions,
        pp_group_size=positions,
        n_local_stages=chunks,
        _stages=[None] * chunks,
        microbatches_per_round=count // max(1, count // positions),
    )
    if single:
        orders = own._get_pipeline_order(facts)
    else:
        orders = {rank: own._calculate_single_rank_operations(facts, rank) for rank in range(positions)}
    return [list(_written(orders[rank], count)) for rank in range(positions)]


def _written(actions, count) -> Iterator[str]:
    for action in actions:
        parts = getattr(action, "sub_actions", None) or (action,)
        yield from (
            str(part) for part in parts if part is not None and part.is_compute_op and part.microbatch_index < count
        )
