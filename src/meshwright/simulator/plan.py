"""Plan in, Simulation out: build the program, price it, run it on the virtual clock, sum up."""

from __future__ import annotations

from meshwright.cost import CostModel
from meshwright.program import build_placed_program, build_program
from meshwright.simulator.engine import Contention
from meshwright.simulator.pricing import price_program
from meshwright.simulator.simulate import simulate_with_memory
from meshwright.simulator.simulation import PeakMemory, Simulation, rank_seconds, step_window
from meshwright.spec import (
    Cluster,
    Graph,
    Placement,
    Plan,
    Program,
    check_placement,
    check_plan,
    slice_stages,
    to_seconds,
)

# Steps until the distance between two step ends is that of all later ones: a schedule that flushes repeats itself from
# its second step on, and the third is compared with the second.
STEADY_STEPS = 3


def simulate_plan(
    plan: Plan | Placement,
    graph: Graph,
    cluster: Cluster,
    *,
    cost: CostModel | None = None,
    num_steps: int = 1,
    contention: Contention = "queued",
) -> Simulation:
    """Predict a plan or a placement: times, memory, utilisation. Its rank r is device r of the cluster.

    ``cost`` is the cost model to price with (default: the cluster's datasheet figures). The timeline shows
    ``num_steps`` steps from a cold start; step time and seconds per rank are those of a steady step, simulated
    beyond them if need be. ``contention`` says how transfers get links that others want too: ``queued`` (first come,
    first served) or ``fair`` (max-min shares). Raises PlanError if the plan fits graph or cluster not, DeadlockError
    if its program can never finish, ProgramError for an unknown model of contention.
    """
    program = program_of(plan, graph, cluster)
    cost = cost or CostModel(cluster=cluster, precision=plan.workload.precision)
    prices = price_program(program, plan, graph, cost)
    timeline, memory = simulate_with_memory(program, prices, num_steps, contention)
    steady = timeline
    if num_steps < STEADY_STEPS:
        steady = simulate_with_memory(program, prices, STEADY_STEPS, contention)[0]
    window = step_window(steady.step, steady.end_ps)
    step_time_s = to_seconds(window[1] - window[0])
    ranks = rank_seconds(steady, window)
    mfu, hfu = _utilisation(plan, graph, cluster, step_time_s)
    return Simulation(
        timeline=timeline,
        step_time_s=step_time_s,
        samples_per_s=plan.workload.global_batch / step_time_s if step_time_s else 0.0,
        ranks=ranks,
        memory=tuple(
            PeakMemory(parts=dict(zip(prices.memory_parts, row, strict=True)))
            for row in memory.peak_parts_bytes.tolist()
        ),
        bubble_fraction=sum(item.idle_s for item in ranks) / (len(ranks) * step_time_s) if step_time_s else 0.0,
        mfu=mfu,
        hfu=hfu,
    )


def program_of(plan: Plan | Placement, graph: Graph, cluster: Cluster) -> Program:
    """The program of a plan or a placement. Raises PlanError if it fits graph or cluster not."""
    if isinstance(plan, Placement):
        check_placement(plan, graph, cluster)
        return build_placed_program(plan, graph)
    check_plan(plan, graph, cluster)
    return build_program(plan, graph)


def _utilisation(
    plan: Plan | Placement, graph: Graph, cluster: Cluster, step_time_s: float
) -> tuple[float | None, float | None]:
    peaks = [cluster.device_kind(rank).peak_flops_per_s.get(plan.workload.precision) for rank in range(plan.num_ranks)]
    if not step_time_s or any(peak is None for peak in peaks):
        return None, None
    available = step_time_s * sum(peak for peak in peaks if peak is not None)
    size, count = plan.microbatch_size, plan.num_microbatches
    executed = sum(
        graph.ops[op].flops.at(size) + graph.ops[op].backward_flops.at(size)
        for stage in slice_stages(graph, plan)
        for op in stage.ops
    )
    return count * graph.flops(size) / available, count * executed / available
