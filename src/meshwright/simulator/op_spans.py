"""What happens inside each computation of a run, op by op.

The instructions stay what is simulated: ops of a stage follow each other on one device, so where each of them lies is
told by the computation's span and its prices alone. Inside a span of a forward: the host's time, then the ops in
order. Inside a backward, or one of its two parts: the host's time, then the ops from the last to the first, and in the
last one of a step, when all gradients of a bucket are there, what filling that bucket takes; its end is the bucket's
mark. Ops that take no time have no part.

Part k ends Σ seconds of the parts up to k after the start, rounded to whole picoseconds; the last one where the span
ends. Where the span was lengthened by processor time of transfers, its parts are in proportion.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.cost import CostModel
from meshwright.cost.memory import FIRST, LAST
from meshwright.program import Bucket, Fold
from meshwright.simulator.matching import rank_of_streams, stream_of_instructions
from meshwright.simulator.prices import Prices
from meshwright.simulator.pricing import exchanged_buckets, place_of_backward
from meshwright.simulator.simulate import Run
from meshwright.simulator.stage_costs import OpSeconds, op_seconds
from meshwright.simulator.state_shards import find_shards
from meshwright.spec import Graph, Opcode, OpSpans, Placement, Plan, Program, slice_stages
from meshwright.spec.instructions import COMPUTATIONS
from meshwright.spec.units import PICOSECONDS_PER_SECOND

Ids = NDArray[np.int64]


class _Parts(NamedTuple):
    """The parts of each cost class, in CSR form: which op, and when it ends after the start of its span, in ps."""

    offsets: Ids
    op: NDArray[np.int32]
    end_ps: Ids


def expand_ops(
    program: Program,
    prices: Prices,
    run: Run,
    plan: Plan | Placement,
    graph: Graph,
    cost: CostModel,
    *,
    fold: Fold | None = None,
) -> OpSpans:
    """The ops of all forwards and backwards of a run; arguments as of `price_program`."""
    buckets = exchanged_buckets(plan, graph, fold)
    devices = fold.ranks if fold else tuple(range(program.num_ranks))
    whole = fold.whole if fold else plan
    parts = _list_parts(program, prices, plan, whole, graph, cost, devices, buckets)
    cost_class = run.unrolled.cost_class
    span = np.flatnonzero(np.diff(parts.offsets)[cost_class])
    found = cost_class[span]
    counts = np.diff(parts.offsets)[found]
    op, start_ps, end_ps = _expand(
        parts, found, prices.duration_ps[found], run.start_ps[span], run.end_ps[span], int(counts.sum())
    )
    names = (*(item.name for item in graph.ops), "host", *(f"fill bucket {bucket.index}" for bucket in buckets))
    return OpSpans(span=np.repeat(span, counts), op=op, start_ps=start_ps, end_ps=end_ps, names=names)


def _list_parts(
    program: Program,
    prices: Prices,
    plan: Plan | Placement,
    whole: Plan | Placement,
    graph: Graph,
    cost: CostModel,
    devices: tuple[int, ...],
    buckets: tuple[Bucket, ...],
) -> _Parts:
    stages = slice_stages(graph, plan)
    priced: dict[tuple[int, str], OpSeconds] = {}
    none = np.zeros(0, np.int64)
    ops, ends = [none] * len(prices.duration_ps), [none] * len(prices.duration_ps)
    stream_ranks = rank_of_streams(program)
    for name, section in program.sections():
        classes = getattr(prices, name).cost_class
        places, streams = place_of_backward(section), stream_of_instructions(section)
        computing = np.flatnonzero(np.isin(section.opcode, COMPUTATIONS))
        for row in computing[np.unique(classes[computing], return_index=True)[1]].tolist():
            stage = stages[int(section.stage[row])]
            kind = cost.cluster.device_kind(devices[int(stream_ranks[streams[row]])])
            key = (stage.index, kind.name)
            if key not in priced:
                held = tuple(bucket for bucket in buckets if stage.index in bucket.stages)
                priced[key] = op_seconds(graph, plan, stage, held, kind, cost, find_shards(whole, stage.index))
            number, end_s = _parts_of(priced[key], Opcode(int(section.opcode[row])), int(places[row]))
            own = np.array([*stage.ops, *range(len(graph.ops), len(graph.ops) + 1 + len(buckets))], np.int64)
            ops[classes[row]], ends[classes[row]] = own[number], np.rint(end_s * PICOSECONDS_PER_SECOND)
    offsets = np.cumsum([0, *(len(item) for item in ops)]).astype(np.int64)
    return _Parts(offsets, np.concatenate(ops).astype(np.int32), np.concatenate(ends).astype(np.int64))


def _parts_of(seconds: OpSeconds, opcode: Opcode, place: int) -> tuple[Ids, NDArray[np.float64]]:
    """The parts of one computation: its ops by place, then the host and the buckets by number; and when each ends."""
    count = len(seconds.forward)
    if opcode is Opcode.FORWARD:
        host_s, taken, order = seconds.host_s[0], seconds.forward, np.arange(count)
    else:
        host_s, order = seconds.host_s[1], np.arange(count)[::-1]
        taken = seconds.backward
        if opcode is Opcode.BACKWARD_INPUT:
            taken = seconds.backward - seconds.weights
        elif opcode is Opcode.BACKWARD_WEIGHT:
            host_s, taken = seconds.host_s[2], seconds.weights
        if opcode is not Opcode.BACKWARD_INPUT and not place & FIRST:
            taken = taken + seconds.accumulate
    fills = seconds.fill_s if place & LAST else {}
    number = np.concatenate([[count], order])
    op_s, fill_s = np.concatenate([[0.0], taken[order]]), np.zeros(count + 1)
    ready, latest = [], 0
    for bucket in sorted(fills):
        # Buckets leave in order: none is filled before the one ahead of it.
        latest = max(latest, count - seconds.first_uses[bucket] if bucket in seconds.first_uses else 0)
        ready.append(latest)
    number = np.insert(number, np.array(ready, np.int64) + 1, [count + 1 + bucket for bucket in sorted(fills)])
    fill_s = np.insert(fill_s, np.array(ready, np.int64) + 1, [fills[bucket] for bucket in sorted(fills)])
    op_s = np.insert(op_s, np.array(ready, np.int64) + 1, 0.0)
    end_s = host_s + np.cumsum(op_s) + np.cumsum(fill_s)
    takes_time = op_s + fill_s > 0.0
    takes_time[0] = host_s > 0.0
    return number[takes_time], end_s[takes_time]


@compiled
def _expand(
    parts: _Parts, cost_class: NDArray[np.int32], duration_ps: Ids, start_ps: Ids, end_ps: Ids, total: int
) -> tuple[NDArray[np.int32], Ids, Ids]:
    op, start, end = np.empty(total, np.int32), np.empty(total, np.int64), np.empty(total, np.int64)
    place = 0
    for i in range(len(cost_class)):
        first, last = parts.offsets[cost_class[i]], parts.offsets[cost_class[i] + 1]
        length, now = end_ps[i] - start_ps[i], start_ps[i]
        for k in range(first, last):
            passed = min(parts.end_ps[k], duration_ps[i])
            if k == last - 1:
                passed = length
            elif length != duration_ps[i]:
                passed = min(int(passed * (length / duration_ps[i])), length)
            op[place], start[place], end[place] = parts.op[k], now, start_ps[i] + passed
            now = end[place]
            place += 1
    return op, start, end
