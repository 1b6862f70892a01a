"""Explain why a step of a plan takes as long as it does, by its critical path, and what would shorten it, by levers.

The step is a steady one, as for `simulate_plan`: from the end of the last step but one to the end of the last. For an
asynchronous schedule it is the last one before the pipeline empties; `simulate_plan` gives the mean of several.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.cost import CostModel
from meshwright.simulator.critical_path import Bound, CriticalPath, find_critical_path
from meshwright.simulator.engine import Contention, check_contention
from meshwright.simulator.host_issue import hosts_bind, issued_run
from meshwright.simulator.levers import Lever, find_levers
from meshwright.simulator.network import durations
from meshwright.simulator.plan import program_of, steady_steps
from meshwright.simulator.program_costs import ProgramCosts, check_costs
from meshwright.simulator.program_estimate import estimate_program
from meshwright.simulator.simulate import instruction_columns, run_unrolled
from meshwright.simulator.simulation import step_window
from meshwright.simulator.unroll import Unrolled, unroll
from meshwright.spec import Cluster, Graph, Placement, Plan, Program, Timeline, to_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StepExplanation:
    """What bounds a step.

    ``path`` holds the spans on the critical path in order of time, cut to the parts that are on it, from time 0 to the
    step time; ``bounds[k]`` says what span k waited for last. ``levers`` are the classes of work on the path.
    """

    step_time_s: float
    path: Timeline
    bounds: tuple[Bound, ...]
    levers: tuple[Lever, ...]


def explain_step(
    plan: Plan | Placement,
    graph: Graph,
    cluster: Cluster,
    *,
    cost: CostModel | None = None,
    contention: Contention = "queued",
) -> StepExplanation:
    """Explain a steady step of a plan or a placement. Arguments and errors are those of `simulate_plan`."""
    program = program_of(plan, graph, cluster)
    cost = cost or CostModel(cluster=cluster, precision=plan.workload.precision)
    costs = estimate_program(program, plan, graph, cost)
    devices = [cluster.device_kind(rank).name for rank in range(program.num_ranks)]
    return explain_program(program, costs, devices, contention=contention)


def explain_program(
    program: Program, costs: ProgramCosts, devices: list[str], *, contention: Contention = "queued"
) -> StepExplanation:
    """Explain a steady step of an estimated program; ``devices`` names the kind of each rank's device."""
    check_contention(contention)
    check_costs(program, costs)
    steps, drains = steady_steps(program)[0], program.epilogue.num_instructions > 0
    # Fast enough hosts run ahead of a steady step, so it is simulated without them first.
    for given in (costs.with_hosts_ahead(), costs):
        unrolled = unroll(program, given, steps)
        network, start_ps, end_ps = run_unrolled(program, unrolled, costs.host_ps, contention)
        begin, stop = step_window(unrolled.step, end_ps, drains=drains)
        if given is costs or not hosts_bind(program, costs, stop - begin):
            break
    columns = instruction_columns(program, unrolled)
    # A receive's span shows the arrival of its bytes; the receive itself runs when they have arrived.
    start_ps = np.where(unrolled.send_of >= 0, end_ps - durations(network), start_ps)
    hosts = issued_run(unrolled.network, network, start_ps)
    path = find_critical_path(network, start_ps, end_ps, (begin, stop), hosts)

    def simulate(changed: Unrolled) -> int:
        ends = run_unrolled(program, changed, costs.host_ps, contention)[2]
        first, last = step_window(changed.step, ends, drains=drains)
        return last - first

    of_streams = [devices[stream.rank] for stream in program.streams]
    return StepExplanation(
        step_time_s=to_seconds(stop - begin) / program.body_steps,
        path=_timeline(program, path, columns, begin),
        bounds=tuple(map(Bound, path.bound.tolist())),
        levers=find_levers(path, unrolled, costs, columns, of_streams, simulate),
    )


def _timeline(program: Program, path: CriticalPath, columns: dict[str, NDArray[Any]], begin_ps: int) -> Timeline:
    none = np.zeros(0, np.int64)
    return Timeline(
        origin="predicted",
        num_ranks=program.num_ranks,
        tracks=program.streams,
        **{name: column[path.instruction] for name, column in columns.items()},
        start_ps=path.start_ps - begin_ps,
        end_ps=path.end_ps - begin_ps,
        memory_rank=none.astype(np.int32),
        memory_time_ps=none,
        memory_bytes=none,
        peak_memory_bytes=(),
        reserved_memory_bytes=(),
    )
