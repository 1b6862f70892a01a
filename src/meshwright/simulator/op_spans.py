"""Expand each computation of a run into its ops.

Instructions remain the unit of simulation: ops of a stage follow each other on one device, so their times follow from
the computation's span and its costs alone. The span of a forward contains the host's time, then the ops in
order. The span of a backward, or of one of its two parts, contains the host's time, then the ops from the last to the
first; in the last backward of a step, when all gradients of a bucket are ready, also the time to fill that bucket,
whose end is the bucket's mark. Ops that take no time are omitted.

Part k ends Σ seconds of the parts up to k after the start, rounded to whole picoseconds; the last one where the span
ends. If the span was lengthened by processor time of transfers, its parts grow in proportion. Where a host issues
asynchronously, no part begins before it is issued (`span_parts`), and between parts the device waits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.cost import CostModel
from meshwright.program import Bucket, Fold, graph_of_program
from meshwright.simulator.host_issue import issued_run
from meshwright.simulator.matching import rank_of_streams, stream_of_instructions
from meshwright.simulator.program_costs import ProgramCosts
from meshwright.simulator.program_estimate import exchanged_buckets, place_of_backward
from meshwright.simulator.simulate import SimulatedRun
from meshwright.simulator.span_parts import issue_parts, list_parts, span_ps
from meshwright.simulator.stage_costs import OpSeconds, op_seconds
from meshwright.simulator.state_shards import find_shards
from meshwright.spec import Graph, Opcode, OpSpans, Placement, Plan, Program, slice_stages
from meshwright.spec.instructions import COMPUTATIONS

Ids = NDArray[np.int64]


class _Parts(NamedTuple):
    """The parts of each cost class, in CSR form: the op, and its end after the start of the span, in ps.

    For parts issued by a host: when each is issued and its earliest end, after the host began with the span, in ps.
    """

    offsets: Ids
    op: NDArray[np.int32]
    end_ps: Ids
    issued_ps: Ids
    earliest_ps: Ids
    is_issued: NDArray[np.bool_]


def expand_ops(
    program: Program,
    costs: ProgramCosts,
    run: SimulatedRun,
    plan: Plan | Placement,
    graph: Graph,
    cost: CostModel,
    *,
    fold: Fold | None = None,
) -> OpSpans:
    """Return the ops of all forwards and backwards of a run; arguments as in `estimate_program`."""
    graph = graph_of_program(graph, program)
    buckets = exchanged_buckets(plan, graph, fold)
    devices = fold.ranks if fold else tuple(range(program.num_ranks))
    whole = fold.whole if fold else plan
    parts = _list_parts(program, costs, plan, whole, graph, cost, devices, buckets)
    network = run.unrolled.network
    cost_class = run.unrolled.cost_class
    span = np.flatnonzero(np.diff(parts.offsets)[cost_class])
    found = cost_class[span]
    counts = np.diff(parts.offsets)[found]
    issued = issued_run(network, run.network, run.start_ps)
    begin_ps = issued.begin_ps[span] if issued else np.zeros(len(span), np.int64)
    op, start_ps, end_ps = _expand(
        parts, found, costs.duration_ps[found], run.start_ps[span], run.end_ps[span], begin_ps, int(counts.sum())
    )
    names = (*(item.name for item in graph.ops), "host", *(f"fill bucket {bucket.index}" for bucket in buckets))
    return OpSpans(span=np.repeat(span, counts), op=op, start_ps=start_ps, end_ps=end_ps, names=names)


def _list_parts(
    program: Program,
    costs: ProgramCosts,
    plan: Plan | Placement,
    whole: Plan | Placement,
    graph: Graph,
    cost: CostModel,
    devices: tuple[int, ...],
    buckets: tuple[Bucket, ...],
) -> _Parts:
    stages = slice_stages(graph, plan)
    estimated: dict[tuple[int, str], OpSeconds] = {}
    none = np.zeros(0, np.int64)
    count = len(costs.duration_ps)
    ops, times = [none] * count, [np.zeros((3, 0), np.int64)] * count
    is_issued = np.zeros(count, np.bool_)
    stream_ranks = rank_of_streams(program)
    for name, section in program.sections():
        classes = getattr(costs, name).cost_class
        places, streams = place_of_backward(section), stream_of_instructions(section)
        computing = np.flatnonzero(np.isin(section.opcode, COMPUTATIONS))
        for row in computing[np.unique(classes[computing], return_index=True)[1]].tolist():
            stage = stages[int(section.stage[row])]
            device, cost_class = devices[int(stream_ranks[streams[row]])], int(classes[row])
            kind = cost.cluster.device_kind(device)
            key = (stage.index, kind.name)
            if key not in estimated:
                held = tuple(bucket for bucket in buckets if stage.index in bucket.stages)
                shards = find_shards(whole, stage.index, cost.cluster)
                estimated[key] = op_seconds(graph, plan, stage, held, kind, cost, shards)
            parts = list_parts(estimated[key], Opcode(int(section.opcode[row])), int(places[row]))
            duration_ps = int(costs.duration_ps[cost_class])
            if parts.issued_s is not None:
                factor = cost.host_factor(device)
                done_ps, issued_ps, earliest_ps = issue_parts(parts, duration_ps, factor)
                moments, is_issued[cost_class] = np.stack([done_ps, issued_ps, earliest_ps]), True
            else:
                moments = np.stack([span_ps(parts.done_s, duration_ps)] * 3)
            takes_time = np.diff(parts.done_s, prepend=0.0) > 0.0
            own = np.array([*stage.ops, *range(len(graph.ops), len(graph.ops) + 1 + len(buckets))], np.int64)
            ops[cost_class], times[cost_class] = own[parts.number[takes_time]], moments[:, takes_time]
    offsets = np.cumsum([0, *(len(item) for item in ops)]).astype(np.int64)
    end_ps, issued_ps, earliest_ps = np.concatenate(times, axis=1).copy()
    return _Parts(offsets, np.concatenate(ops).astype(np.int32), end_ps, issued_ps, earliest_ps, is_issued)


@compiled
def _expand(
    parts: _Parts,
    cost_class: NDArray[np.int32],
    duration_ps: Ids,
    start_ps: Ids,
    end_ps: Ids,
    begin_ps: Ids,
    total: int,
) -> tuple[NDArray[np.int32], Ids, Ids]:
    op, start, end = np.empty(total, np.int32), np.empty(total, np.int64), np.empty(total, np.int64)
    place = 0
    for i in range(len(cost_class)):
        first, last = parts.offsets[cost_class[i]], parts.offsets[cost_class[i] + 1]
        length, now = end_ps[i] - start_ps[i], start_ps[i]
        for k in range(first, last):
            op[place], start[place], passed = parts.op[k], now, parts.end_ps[k]
            if parts.is_issued[cost_class[i]]:
                start[place] = max(now, begin_ps[i] + parts.issued_ps[k])
                passed = max(passed, begin_ps[i] + parts.earliest_ps[k] - start_ps[i])
            elif k == last - 1:
                passed = length
            elif length != duration_ps[i]:
                passed = min(int(passed * (length / duration_ps[i])), length)
            now = start_ps[i] + passed
            end[place] = now
            place += 1
    return op, start, end
