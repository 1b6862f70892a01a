"""How long it takes to find the critical path of a million instructions, and to explain a step of 64 stages."""

from functools import partial
from itertools import pairwise
from time import process_time

import numpy as np
from harness import make_row, parse_options, publish

from meshwright.cost import CostModel
from meshwright.program import build_program
from meshwright.simulator import estimate_program, explain_step
from meshwright.simulator.critical_path import find_critical_path
from meshwright.simulator.network import durations
from meshwright.simulator.simulate import run_unrolled
from meshwright.simulator.unroll import unroll
from meshwright.spec import Plan, StagePlan, Workload, load_cluster, load_shipped_graph

STAGES, MICROBATCHES, INSTRUCTIONS = 64, 512, 1_000_000
SECONDS_PER_PATH = 0.3


def main() -> int:
    options = parse_options(__doc__)
    graph, cluster = load_shipped_graph("llama3-70b"), load_cluster("8x8xH100")
    edges = [round(k * len(graph.layers) / STAGES) for k in range(STAGES + 1)]
    plan = Plan(
        model=graph.name,
        graph_hash=graph.content_hash,
        cluster=cluster.name,
        workload=Workload(global_batch=MICROBATCHES),
        stages=tuple(StagePlan(start=a, stop=b, ranks=(rank,)) for rank, (a, b) in enumerate(pairwise(edges))),
        num_microbatches=MICROBATCHES,
        schedule="1f1b",
    )
    cost = CostModel(cluster=cluster, precision=plan.workload.precision)
    program = build_program(plan, graph)
    costs = estimate_program(program, plan, graph, cost)
    unrolled = unroll(program, costs, -(-INSTRUCTIONS // program.body.num_instructions))
    network, start_ps, end_ps = run_unrolled(program, unrolled, costs.host_ps)
    start_ps = np.where(unrolled.send_of >= 0, end_ps - durations(network), start_ps)
    find = partial(find_critical_path, network, start_ps, end_ps, (0, int(end_ps.max())))
    length, repeats = len(find().instruction), 3 if options.quick else 21
    rows = [
        scored(f"path of {len(end_ps):,} instructions, {length:,} on it", find, repeats, SECONDS_PER_PATH),
        scored(
            f"a step of {STAGES} stages × {MICROBATCHES} microbatches explained",
            partial(explain_step, plan, graph, cluster, cost=cost),
            repeats,
        ),
    ]
    return publish("critical_path", rows, options, "Processor time of one thread, compiled code loaded.")


def scored(name: str, work, repeats: int, target: float | None = None):
    """The median of the repetitions; the spread is the half width of the middle 80 % of them over it."""
    taken = []
    for _ in range(repeats + 1):
        start = process_time()
        work()
        taken.append(process_time() - start)
    low, middle, high = np.quantile(taken[1:], [0.1, 0.5, 0.9])
    return make_row(name, float(middle), "s", spread=float(high - low) / 2 / float(middle), target=target)


if __name__ == "__main__":
    raise SystemExit(main())
