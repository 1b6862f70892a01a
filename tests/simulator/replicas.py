"""Plans with replicas, by hand and at random, on clusters that are even or not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from meshwright.cost import CostModel
from meshwright.spec import Cluster, DeviceGroup, GradientExchange, Plan, StagePlan, Workload
from tests.graphs import chain_graph, even_bounds
from tests.simulator.plans import FixedCost, small_cluster

POSITIONS = {"interleaved": lambda s, p: s % p, "looped-bfs": lambda s, p: s % p}
POSITIONS |= {name: lambda s, p: min(s, 2 * p - 1 - s) for name in ("zb-v", "dualpipe-v")}


def make_plan(graph, places, num_microbatches, *, schedule="1f1b", bucket_bytes=2**20, overlap=True):
    """``places[s][r]`` is the rank of replica r of stage s."""
    return Plan(
        model="chain",
        graph_hash=graph.content_hash,
        cluster="test",
        workload=Workload(global_batch=2 * num_microbatches),
        num_microbatches=num_microbatches,
        schedule=schedule,
        exchange=GradientExchange(bucket_bytes=bucket_bytes, overlap=overlap),
        stages=tuple(
            StagePlan(start=start, stop=stop, ranks=tuple(places[stage]))
            for stage, (start, stop) in enumerate(even_bounds(len(graph.layers), len(places)))
        ),
    )


def grid(num_stages, num_replicas, *, by_replica=True):
    """Ranks of stages × replicas, a pipeline's or a stage's beside each other."""
    numbers = np.arange(num_stages * num_replicas)
    shaped = numbers.reshape(num_replicas, num_stages).T if by_replica else numbers.reshape(num_stages, num_replicas)
    return shaped.tolist()


def with_kinds(cluster: Cluster, slow: tuple[int, ...]) -> Cluster:
    """The cluster with other devices on some nodes."""
    kind = cluster.device_kinds[0]
    other = replace(kind, name="slow", peak_flops_per_s={"float32": 0.5e9})
    nodes = tuple(
        replace(node, devices=(DeviceGroup(kind="slow", count=node.num_devices),)) if index in slow else node
        for index, node in enumerate(cluster.nodes)
    )
    return replace(cluster, device_kinds=(kind, other), nodes=nodes)


@st.composite
def cases(draw):
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "zb-h1", "interleaved", "looped-bfs", "zb-v", "dualpipe-v"]))
    num_positions, num_replicas = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    num_stages = num_positions * (1 if schedule not in POSITIONS else 2)
    layout = draw(st.sampled_from(["by replica", "by stage", "mixed"]))
    places = np.array(grid(num_positions, num_replicas, by_replica=layout == "by replica"))
    if layout == "mixed":
        places = np.array(draw(st.permutations(places.ravel().tolist()))).reshape(places.shape)
    position = POSITIONS.get(schedule, lambda s, p: s)
    rows = [places[position(stage, num_positions)].tolist() for stage in range(num_stages)]
    if schedule in ("gpipe", "1f1b") and num_stages > 1 and draw(st.integers(0, 5)) == 0:
        rows[0], rows[1] = rows[0] + rows[1][1:], rows[1][:1]
    skips = ((0, num_stages - 1),) if num_stages > 2 and draw(st.booleans()) else ()
    graph = chain_graph(
        num_stages * draw(st.integers(1, 2)) + 1,
        tied=draw(st.booleans()),
        skips=skips,
        random=(0, num_stages) if draw(st.booleans()) else (),
        frozen=draw(st.integers(0, 1)),
    )
    # dualpipe-v takes at least as many microbatches as it has stages, interleaved groups of as many as positions.
    least = num_stages * num_replicas if schedule == "dualpipe-v" else len(rows[0])
    count = draw(st.integers(least, least + 9))
    if schedule == "interleaved":
        count = num_positions * num_replicas * draw(st.integers(1, 3))
    plan = make_plan(
        graph,
        rows,
        count,
        schedule=schedule,
        bucket_bytes=draw(st.sampled_from([64, 2**20])),
        overlap=draw(st.booleans()),
    )
    num_ranks = num_positions * num_replicas
    devices = draw(st.sampled_from([1, 2, 4, num_positions, num_ranks]))
    cluster = small_cluster(-(-num_ranks // devices), devices, num_nics=draw(st.sampled_from([1, devices])))
    slow = draw(st.sets(st.integers(0, len(cluster.nodes) - 1), max_size=2))
    cluster = with_kinds(cluster, tuple(slow)) if draw(st.booleans()) else cluster
    number = st.integers(0, 6)
    fixed = FixedCost(
        cluster=cluster,
        send=draw(number) * 1e-6,
        all_reduce=draw(number) * 1e-6,
        optimizer=draw(number) * 1e-6,
        fill=draw(st.integers(0, 1)) * 1e-6,
        host=draw(st.sampled_from([0.0, 0.0, 0.0, 1e-6])),
        overhead=draw(st.sampled_from([0.0, 0.5e-6])),
    )
    cost = draw(st.sampled_from([fixed, CostModel(cluster=cluster)]))
    return plan, graph, cluster, {"cost": cost, "num_steps": draw(st.integers(1, 2))}
