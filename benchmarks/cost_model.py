"""How many kernels are estimated in a second, and how long a model of 70 B parameters takes."""

from functools import partial
from time import perf_counter

import numpy as np
from harness import make_row, parse_options, publish

from meshwright.cost import CostModel
from meshwright.cost.kernels import Kernel, shipped_model
from meshwright.spec import load_cluster, load_shipped_graph

SECONDS_PER_MILLION = 1.0
SECONDS_PER_GRAPH = 0.1


def main() -> int:
    options = parse_options(__doc__)
    repeats, count = (2, 100_000) if options.quick else (7, 1_000_000)
    cluster = load_cluster("H100")
    device = cluster.device_kinds[0]
    rows = []
    for dtype in ("bfloat16", "float8_e4m3fn"):
        kernel = Kernel(op="matmul", dtype=dtype, device=device)
        rng = np.random.default_rng(0)
        sizes = {name: np.floor(2 ** rng.uniform(0, 14, count)) for name in ("m", "n", "k")}
        shipped_model().predict(kernel, {name: column[:100] for name, column in sizes.items()})
        taken = [timed(partial(shipped_model().predict, kernel, sizes)) for _ in range(repeats)]
        rows.append(scored(f"a million products, {dtype}", np.array(taken) * 1e6 / count, SECONDS_PER_MILLION))
    graph = load_shipped_graph("llama3-70b")
    CostModel(cluster=cluster, precision="bfloat16").estimate_ops(graph, 1, device)
    taken = [
        timed(lambda: CostModel(cluster=cluster, precision="bfloat16").estimate_ops(graph, 1, device))
        for _ in range(repeats)
    ]
    rows.append(scored(f"{graph.name}, {len(graph.ops)} ops", np.array(taken), SECONDS_PER_GRAPH))
    return publish("cost_model", rows, options)


def timed(work) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


def scored(name: str, seconds: np.ndarray, target: float):
    """The median of the repetitions; the spread is the half width of the middle 80 % of them over it."""
    low, middle, high = np.quantile(seconds, [0.1, 0.5, 0.9])
    return make_row(name, float(middle), "s", spread=float(high - low) / 2 / float(middle), target=target)


if __name__ == "__main__":
    raise SystemExit(main())
