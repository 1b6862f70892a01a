"""A bench with a small model, and states on it, for the tests of the playground."""

from __future__ import annotations

from meshwright.playground import Controls, OfferedModel, Workbench
from meshwright.spec import Cluster
from tests.graphs import chain_graph
from tests.simulator.plans import fast_cluster

NUM_LAYERS = 12


def make_bench(clusters: dict[str, Cluster] | None = None) -> Workbench:
    graph = chain_graph(NUM_LAYERS, width=64)
    uneven = chain_graph(7, width=16, tied=True)
    return Workbench(
        {"chain": OfferedModel(open=lambda: lambda _: graph), "tied": OfferedModel(open=lambda: lambda _: uneven)},
        clusters,
    )


def let_hosts_issue_at_once(monkeypatch) -> None:
    """So that devices and links alone decide, however small the model is."""
    monkeypatch.setattr("meshwright.playground.controls.load_cluster", fast_cluster)


def make_state(**values) -> Controls:
    return Controls(**{"model": "chain", "precision": "float32", "global_batch": 64, "microbatch_size": 2, **values})
