"""FlexFlow's search: simulated proposals per second, and how far from the optimum it ends where that is known.

Instances and seeds: splits/planner_flexflow.json. Rates are per second of CPU time of one core, times two: a search
runs a chain on each core. A proposal that equals what is there is drawn anew and not counted.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from planning.soap_optimum import count_strategies, find_optimum

from benchmarks.harness import Row, make_row
from meshwright.cost import CostModel
from meshwright.planner.methods.flexflow import SoapSpace, search_soap, soap_space
from meshwright.spec import Workload, load_cluster, load_shipped_graph
from tests.graphs import chain_graph
from tests.planner.methods.soap_problems import draw_problem, make_soap

SPLIT = json.loads((Path(__file__).parents[1] / "splits" / "planner_flexflow.json").read_text())
CORES, WANTED_PER_S, WITHIN = 2, 20_000, 1.02
# Proposals of a second, shorter search of the larger spaces, which is not scored.
FEW = 1000
ARMS = {
    "to the end": {"cut": False},
    "until certain": {"cut": True},
}


def rows(quick: bool) -> list[Row]:
    """All rows."""
    return [*rate_rows(quick), *simulation_rows(quick), *optimum_rows(quick)]


def rate_rows(quick: bool) -> list[Row]:
    """Seconds per simulated proposal with both cores, by how proposals are simulated; all arms give one answer."""
    item = SPLIT["rates"]
    space = make_space(load_shipped_graph(item["graph"]), item["cluster"], item["global_batch"])
    count = item["num_proposals"] // (6 if quick else 1)
    taken: dict[str, list[float]] = {name: [] for name in ARMS}
    answers = set()
    search_soap(space, num_proposals=500)
    for _ in range(2 if quick else 3):
        for name, options in ARMS.items():
            begun = time.process_time()
            found = search_soap(space, num_proposals=count, num_chains=item["num_chains"], seed=item["seed"], **options)
            taken[name].append((time.process_time() - begun) / found.num_simulated / CORES)
            answers.add(json.dumps(found.document()))
    assert len(answers) == 1, "simulations differ"
    made = []
    for name, seconds in taken.items():
        middle = float(np.median(seconds))
        spread = (max(seconds) - min(seconds)) / 2 / middle
        title = f"ResNet-50 on 8 devices, simulated {name}: {1 / middle:,.0f} proposals per s"
        made.append(make_row(title, middle * 1e6, "µs", spread=spread, target=1e6 / WANTED_PER_S))
    return made


def simulation_rows(quick: bool) -> list[Row]:
    """Microseconds per proposal of one chain in strategies that can run."""
    made = []
    for name, cluster_name, batch in SPLIT["simulations"][: 2 if quick else None]:
        cluster, graph = load_cluster(cluster_name), load_shipped_graph(name)
        cost, workload = CostModel(cluster=cluster), Workload(global_batch=batch)
        space = soap_space(graph, cluster, workload, cost, can_run=True)
        search_soap(space, num_proposals=200, num_chains=1)
        taken = []
        for _ in range(2):
            begun = time.process_time()
            found = search_soap(space, num_proposals=10_000, num_chains=1)
            taken.append((time.process_time() - begun) / found.num_simulated)
        made.append(make_row(f"{name} on {cluster_name}", min(taken) * 1e6, "µs"))
    return made


def optimum_rows(quick: bool) -> list[Row]:
    """The worst and the mean of found step over shortest step, of all strategies simulated."""
    item, ratios, few = SPLIT["optimum"], [], []
    spaces = [random_space(*drawn) for drawn in item["random"]]
    spaces += [make_space(chain_graph(n, width=width), cluster, batch) for n, width, cluster, batch in item["chains"]]
    for space in spaces[:: 4 if quick else 1]:
        best, _ = find_optimum(space.soap)
        found = search_soap(space, num_proposals=item["num_proposals"], seed=item["seed"])
        ratios.append(found.step_s * 1e12 / best)
        if count_strategies(space.soap) > item["num_proposals"]:
            hasty = search_soap(space, num_proposals=FEW, seed=item["seed"])
            few.append(hasty.step_s * 1e12 / best)
    return [
        make_row(
            f"worst of {len(ratios)} spaces that enumeration settles, over the optimum", max(ratios), "", target=WITHIN
        ),
        make_row("their mean", float(np.mean(ratios)), ""),
        make_row(
            f"worst of {len(few)} with more strategies than proposals, after {FEW} proposals", max(few, default=1.0), ""
        ),
    ]


def make_space(graph, cluster_name: str, batch: int) -> SoapSpace:
    """The space of a graph on a cluster by its short form."""
    cluster = load_cluster(cluster_name)
    return soap_space(graph, cluster, Workload(global_batch=batch), CostModel(cluster=cluster))


def random_space(seed: int, num_layers: int, num_devices: int, num_nodes: int, barrier: bool) -> SoapSpace:
    """Arrays of a random problem in the place of a graph's."""
    problem = draw_problem(
        np.random.default_rng(seed),
        num_layers=num_layers,
        num_devices=num_devices,
        num_nodes=num_nodes,
        barrier=barrier,
        most_ps=1000,
    )
    carrier = make_space(chain_graph(num_layers), f"{num_devices}xA100", 12)
    return replace(carrier, soap=make_soap(problem))
