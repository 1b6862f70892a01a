"""Simulate a plan (`simulate_plan`): build its program, estimate its costs, run it, sum up; list ops (`expand_ops`).

Identical pipelines are simulated once (`pipeline_alike`). The steady step is the first step if all later steps repeat
it (see below); otherwise `STEADY_STEPS` steps are simulated.

A steady step follows other steps without a pause: hosts that are fast enough have issued all of it before. So the step
is simulated without hosts first, and with hosts if a step of that length has to wait for a host (`host_issue`). The
returned timeline starts cold: hosts and devices begin at the same time.

If all steps repeat the first step, each Δ later, then simulating one step is enough. Take a program without prologue
and epilogue whose steps interact only through the order of streams and the queues for links. Let every stream whose
first instruction waits for nothing end its step at Δ. Then step 2 is step 1 moved by Δ if

    streams   each other stream ends its step no later than Δ after the waits of its first instruction are over
    links     each shared link is released no later than Δ after it was first requested

because then the step before delays nothing, and every later step repeats it by induction. The spans of a steady step,
cut to the window of `simulation`, are those of the first step cut to (T - Δ, T), where T is its end. If one of these
conditions fails, later steps may still come to repeat each other, and have to be simulated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.cost import CostModel
from meshwright.program import Bucket, Fold, build_folded_program, build_placed_program, build_program, graph_of_program
from meshwright.simulator.arrivals import find_arrivals, links_of, uses_shared_links
from meshwright.simulator.engine import Contention, check_contention
from meshwright.simulator.host_issue import hosts_bind, issued_ps, issued_run
from meshwright.simulator.message_matching import rank_of_streams, stream_of_instructions
from meshwright.simulator.pipeline_alike import breaks_symmetry, find_fold
from meshwright.simulator.policy_simulation import POLICY_STEPS, run_policy, steady_window
from meshwright.simulator.program_costs import ProgramCosts
from meshwright.simulator.program_estimate import estimate_program, exchanged_buckets, place_of_backward
from meshwright.simulator.simulate import MAX_UNROLLED, SimulatedRun, record_run, record_spans, run_program
from meshwright.simulator.simulation import (
    NodeMemory,
    PeakMemory,
    RankSeconds,
    Simulation,
    node_memory,
    rank_seconds,
    step_window,
)
from meshwright.simulator.span_parts import issue_parts, list_parts, span_ps
from meshwright.simulator.stage_costs import OpSeconds, op_seconds
from meshwright.simulator.state_shards import find_shards
from meshwright.simulator.teams import form_teams
from meshwright.spec import (
    Cluster,
    DeadlockError,
    Graph,
    Opcode,
    OpSpans,
    Placement,
    Plan,
    PlanError,
    Program,
    ProgramError,
    Sharding,
    Timeline,
    check_fit,
    computed_again,
    slice_stages,
    suggest,
    to_seconds,
)
from meshwright.spec.instructions import COMPUTATIONS
from meshwright.spec.units import PICOSECONDS_PER_SECOND

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


# Instructions remain the unit of simulation: ops of a stage follow each other on one device, so their times follow from
# the computation's span and its costs alone. The span of a forward contains the host's time, then the ops in order. The
# span of a backward, or of one of its two parts, contains the host's time, then the ops from the last to the first; in
# the first backward of a step, when all gradients of a bucket are ready, also the time to fill that bucket, whose end
# is the bucket's mark. Ops that take no time are omitted.
#
# Part k ends Σ seconds of the parts up to k after the start, rounded to whole picoseconds; the last one where the span
# ends. If the span was lengthened by processor time of transfers, its parts grow in proportion. Where a host issues
# asynchronously, no part begins before it is issued (`span_parts`), and between parts the device waits.
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
    """Return the spans of the ops inside all forwards and backwards of a run.

    ``program``, ``plan``, ``graph``, ``cost`` and ``fold`` are those that were passed to `estimate_program`, ``costs``
    its result.
    """
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


Detail = Literal["instructions", "ops"]
DETAILS: tuple[Detail, ...] = get_args(Detail)

# Steps until the distance between two step ends is that of all later ones: a synchronous schedule repeats from its
# second step on, and the third is compared with the second.
STEADY_STEPS = 3
# A program whose steps overlap settles while its queues fill, and then repeats after one step or a few. The mean is
# taken over MEAN_SHARE of the simulated steps, before the last one, which drains. A step of very many microbatches
# settles within itself, so fewer steps are enough, and more would exceed MAX_UNROLLED.
SETTLED_STEPS, LEAST_SETTLED_STEPS, MEAN_SHARE = 20, 4, 0.6


def steady_steps(program: Program) -> tuple[int, int]:
    """Return how many steps to simulate to reach a steady step, and over how many of the last steps to average."""
    if not program.crosses_steps:
        return STEADY_STEPS, 1
    most = MAX_UNROLLED // max(program.body.num_instructions, 1)
    count = min(max(most, LEAST_SETTLED_STEPS), SETTLED_STEPS)
    return count, int(MEAN_SHARE * count)


def simulate_plan(
    plan: Plan | Placement,
    graph: Graph,
    cluster: Cluster,
    *,
    cost: CostModel | None = None,
    num_steps: int = 1,
    contention: Contention = "queued",
    detail: Detail = "instructions",
) -> Simulation:
    """Predict times, memory and utilisation of a plan or a placement, whose rank r is device r of the cluster.

    If the plan splits ops over teams, rank r is team r, and the figures of a rank hold for each device of its team.

    ``cost`` is the cost model (default: the cluster's datasheet figures). The timeline shows ``num_steps`` steps from a
    cold start; step time and seconds per rank are those of a steady step, for which more steps are simulated if
    necessary. ``contention`` is the model of contended links: ``queued`` (one transfer after the other, first come,
    first served) or ``fair`` (all at once, with max-min fair rates). ``detail="ops"`` also returns the ops inside the
    spans (`Simulation.op_spans`), which changes no time. Raises PlanError if the plan does not match the graph or the
    cluster, DeadlockError if its program can never finish, ProgramError for an unknown contention or detail.
    """
    check_contention(contention)
    check_detail(detail)
    cost = cost or CostModel(cluster=cluster, precision=plan.workload.precision)
    check_fit(plan, graph, cluster)
    if isinstance(plan, Plan) and plan.exchange.policy:
        if detail == "ops":
            raise PlanError(
                f"Ops were requested for the exchange policy {plan.exchange.policy}, whose simulation has instructions "
                "only. Leave --detail out."
            )
        decided = _simulate_policy(plan, graph, cost, num_steps, contention)
        nodes = node_memory(plan, graph, cost.cluster)
        return _sum_up(decided, None, None, plan, graph, cluster, cost.sharding, nodes)
    if isinstance(plan, Plan):
        plan, graph, cluster, cost = form_teams(plan, graph, cluster, cost)
    fold = None if isinstance(plan, Placement) else find_fold(plan, graph, cost.cluster)
    outcome, simulated = None, plan
    if fold is not None:
        try:
            program = build_folded_program(fold, graph)
            costs = estimate_program(program, fold.plan, graph, cost, fold=fold)
            outcome = _simulate(program, costs, num_steps, contention, folded=True)
            simulated = fold.plan
        except (_NotAlikeError, DeadlockError, PlanError):
            # Simulate all ranks instead: either this works, or the error then names the real ranks.
            fold = None
    if outcome is None:
        program = program_of(plan, graph, cluster)
        costs = estimate_program(program, plan, graph, cost)
        outcome = _simulate(program, costs, num_steps, contention, folded=False)
    ops = None
    if detail == "ops" and outcome.run is not None:
        ops = expand_ops(program, costs, outcome.run, simulated, graph, cost, fold=fold)
    nodes = node_memory(plan, graph, cost.cluster)
    return _sum_up(outcome, ops, fold, plan, graph, cluster, cost.sharding, nodes)


def check_detail(detail: str) -> None:
    """Raise ProgramError if the level of detail is unknown."""
    if detail not in DETAILS:
        raise ProgramError(f"Unknown detail {detail!r}{suggest(detail, DETAILS)}; expected {' or '.join(DETAILS)}.")


class _NotAlikeError(Exception):
    """Ranks that a representative stands for behave differently from it."""


class _Outcome(NamedTuple):
    """What the ranks of a program do: spans and memory of the steps shown, and the times of a steady step.

    ``run``: the run of the steps shown; None under an exchange policy.
    """

    run: SimulatedRun | None
    timeline: Timeline
    memory: tuple[PeakMemory, ...]
    step_time_s: float
    seconds: tuple[RankSeconds, ...]


def _simulate(
    program: Program, costs: ProgramCosts, num_steps: int, contention: Contention, *, folded: bool
) -> _Outcome:
    ahead = costs.with_hosts_ahead()

    def run(steps: int, given: ProgramCosts) -> SimulatedRun:
        done = run_program(program, given, steps, contention)
        if folded and _is_broken(done, contention):
            raise _NotAlikeError
        return done

    def spans(steps: int, given: ProgramCosts) -> Timeline:
        return timeline if given is costs and num_steps >= steps else record_spans(program, run(steps, given))

    first = run(1, ahead)
    shown = first if num_steps == 1 and ahead is costs else run(num_steps, costs)
    timeline, memory = record_run(program, costs, shown)
    (needed, count), averaged, drains = steady_steps(program), 1, program.epilogue.num_instructions > 0
    distance = step_distance(program, ahead, first)
    if distance is not None:
        steady = timeline if shown is first else record_spans(program, first)
        last = int(steady.end_ps.max(initial=0))
        window = (last - distance, last)
    else:
        steady, averaged = spans(needed, ahead), count
        window = step_window(steady.step, steady.end_ps, averaged, drains=drains)
    if hosts_bind(program, costs, (window[1] - window[0]) / averaged):
        most = max(MAX_UNROLLED // program.body.num_instructions, 2)
        steady, averaged = spans(min(needed, most), costs), count
        window = step_window(steady.step, steady.end_ps, averaged, drains=drains)
    parts = (dict(zip(costs.memory_parts, row, strict=True)) for row in memory.peak_parts_bytes.tolist())
    inside_s, copied_s = (_inside_s(program, costs, column) for column in (costs.exchanged_ps, costs.copied_ps))
    host_s = (issued_ps(program, costs) / (PICOSECONDS_PER_SECOND * program.body_steps)).tolist()
    return _Outcome(
        run=shown,
        timeline=timeline,
        memory=tuple(PeakMemory(parts=item) for item in parts),
        step_time_s=to_seconds((window[1] - window[0]) / averaged) / program.body_steps,
        seconds=tuple(
            replace(item.per_step(program.body_steps), exchanged_inside_s=each, copied_inside_s=copied, host_s=host)
            for item, each, copied, host in zip(
                rank_seconds(steady, window[1] - window[0], _window_steps(steady, averaged, drains)),
                inside_s,
                copied_s,
                host_s,
                strict=True,
            )
        ),
    )


def _simulate_policy(plan: Plan, graph: Graph, cost: CostModel, num_steps: int, contention: Contention) -> _Outcome:
    run, timeline = run_policy(plan, graph, cost, max(num_steps, POLICY_STEPS), contention=contention)
    steps, length_ps = steady_window(timeline)
    shown = timeline.until(num_steps)
    parts = (dict(zip(run.costs.memory_parts, row, strict=True)) for row in run.peak_parts_bytes.tolist())
    return _Outcome(
        run=None,
        timeline=shown,
        memory=tuple(PeakMemory(parts=item) for item in parts),
        step_time_s=to_seconds(length_ps / len(steps)),
        seconds=rank_seconds(timeline, length_ps, steps),
    )


def _inside_s(program: Program, costs: ProgramCosts, waited_ps: NDArray[np.int64] | None) -> list[float]:
    """Return the seconds per step for which each rank's computations wait, from ``waited_ps`` per cost class."""
    if waited_ps is None:
        return [0.0] * program.num_ranks
    ranks = np.repeat(rank_of_streams(program), np.diff(program.body.stream_offsets))
    total_ps = np.bincount(ranks, waited_ps[costs.body.cost_class], program.num_ranks)
    found: list[float] = (total_ps / (PICOSECONDS_PER_SECOND * program.body_steps)).tolist()
    return found


def _window_steps(timeline: Timeline, count: int, drains: bool) -> range:
    """Return the last ``count`` steps of a timeline, without the one that drains."""
    stop = int(timeline.step.max(initial=0)) + 1 - drains
    return range(stop - count, stop)


def _is_broken(run: SimulatedRun, contention: Contention) -> bool:
    """Whether the run showed that ranks differ from their representative."""
    if contention == "fair":
        # Shares are rounded, and the order of rounding depends on the ranks.
        return run.network.num_private < len(run.network.route_offsets) - 1
    return breaks_symmetry(run.network, run.end_ps, run.unrolled.num_links)


def _sum_up(
    outcome: _Outcome,
    ops: OpSpans | None,
    fold: Fold | None,
    plan: Plan | Placement,
    graph: Graph,
    cluster: Cluster,
    sharding: Sharding,
    nodes: tuple[NodeMemory, ...],
) -> Simulation:
    step_time_s = outcome.step_time_s
    stands = fold.representatives().tolist() if fold else range(plan.num_ranks)
    if isinstance(plan, Plan) and plan.exchange.policy:
        stands = range(plan.num_devices)
    ranks = tuple(outcome.seconds[rank] for rank in stands)
    mfu, hfu = _utilisation(plan, graph, cluster, step_time_s, sharding)
    num_samples = plan.workload.global_batch * sharding.expert * plan.used_share
    return Simulation(
        simulated=outcome.timeline,
        simulated_ops=ops,
        fold=fold,
        step_time_s=step_time_s,
        samples_per_s=num_samples / step_time_s if step_time_s else 0.0,
        ranks=ranks,
        memory=tuple(outcome.memory[rank] for rank in stands),
        nodes=nodes,
        bubble_fraction=sum(item.idle_s for item in ranks) / (len(ranks) * step_time_s) if step_time_s else 0.0,
        mfu=mfu,
        hfu=hfu,
    )


def program_of(plan: Plan | Placement, graph: Graph, cluster: Cluster) -> Program:
    """Return the program of a plan or a placement.

    Raises PlanError if the plan or placement does not match the graph or the cluster, and as `build_program` does.
    """
    check_fit(plan, graph, cluster)
    return build_placed_program(plan, graph) if isinstance(plan, Placement) else build_program(plan, graph)


def _utilisation(
    plan: Plan | Placement, graph: Graph, cluster: Cluster, step_time_s: float, sharding: Sharding
) -> tuple[float | None, float | None]:
    num_devices = np.bincount(cluster.columns().kind[: plan.num_ranks], minlength=len(cluster.device_kinds)).tolist()
    rates = [kind.peak_flops_per_s.get(plan.workload.numbers.compute) for kind in cluster.device_kinds]
    used = [(count, rate) for count, rate in zip(num_devices, rates, strict=True) if count]
    if not step_time_s or any(rate is None for _, rate in used):
        return None, None
    available = step_time_s * sum(count * rate for count, rate in used if rate is not None)
    size, count = plan.microbatch_size, plan.num_microbatches
    executed = sum(
        graph.ops[op].flops.at(size) + graph.ops[op].backward_flops.at(size)
        for stage in slice_stages(graph, plan)
        for op in stage.ops
    )
    again = (op for start, stop in graph.recompute for op in computed_again(graph, start, stop))
    executed += sum(graph.ops[op].flops.at(size) for op in again)
    # The model FLOPs of each device of a team; expert ranks have samples of their own.
    model_flops = (graph.model_flops or graph.total_flops).at(size) * sharding.expert / sharding.width
    return count * model_flops / available, count * executed / available


def step_distance(program: Program, costs: ProgramCosts, run: SimulatedRun) -> int | None:
    """Return Δ, the time in ps after which each step repeats the step before; None if one step does not show it.

    ``run`` is the run of one step. The result is None if the conditions of the module's docstring fail, if instructions
    wait for those of an earlier step or need only some of their waits, and if processor time of transfers is charged,
    because that time depends on everything that runs.
    """
    if program.crosses_steps or program.prologue.num_instructions or program.epilogue.num_instructions:
        return None
    if costs.host_ps.any():
        return None
    if len(program.body.join_instruction):
        return None
    network, end_ps = run.network, run.end_ps
    used = np.flatnonzero(np.diff(network.stream_offsets))
    first, last_ps = network.stream_offsets[used], end_ps[network.stream_offsets[used + 1] - 1]
    begins = network.wait_offsets[first] == network.wait_offsets[first + 1]
    distance = int(last_ps[begins].max(initial=0))
    if bool((last_ps[begins] != distance).any()):
        return None
    chosen = uses_shared_links(network)
    wanting = np.flatnonzero(chosen)
    chosen[first] = True
    arrival_ps = find_arrivals(network, end_ps, chosen)
    if bool((last_ps > arrival_ps[first] + distance).any()):
        return None
    wanted = np.full(run.unrolled.num_links, np.iinfo(np.int64).max - distance)
    freed = np.zeros(run.unrolled.num_links, np.int64)
    links, user = links_of(network, wanting)
    np.minimum.at(wanted, links, arrival_ps[wanting][user])
    np.maximum.at(freed, links, end_ps[wanting][user])
    return None if bool((freed > wanted + distance).any()) else distance
