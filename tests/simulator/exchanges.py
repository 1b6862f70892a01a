"""Data parallelism layer by layer, two even machines with one link, and a recurrence for its steps."""

from __future__ import annotations

from dataclasses import replace

from meshwright import Plan, Workload, simulate_plan
from meshwright.spec import (
    Cluster,
    DeviceGroup,
    DeviceKind,
    Extent,
    GradientExchange,
    Link,
    Node,
    Optimizer,
    StagePlan,
    load_shipped_graph,
)
from tests.graphs import make_plan

COMPUTE_S, START_S = 0.3, 100e-6


def layered_plan(graph, num_replicas, *, num_microbatches=None, **exchange):
    """Data parallelism in which every layer is a stage of its own."""
    plan = make_plan(graph, [(0, len(graph.layers))], [num_replicas], num_microbatches or num_replicas)
    stages = tuple(StagePlan(start=i, stop=i + 1, ranks=plan.stages[0].ranks) for i in range(len(graph.layers)))
    return replace(plan, stages=stages, schedule="interleaved", exchange=GradientExchange(**exchange))


def even_machines(count: int, bytes_per_s: float, *, latency_s: float = 0.0, flops_per_s: float = 1e12) -> Cluster:
    """Machines with one device and one link each, on which nothing but products takes time."""
    kind = DeviceKind(
        name="even",
        memory_bytes=2**50,
        memory_bandwidth_bytes_per_s=1e30,
        peak_flops_per_s={"float32": flops_per_s},
        source="round numbers",
    )
    link = Link(latency_s=latency_s, bandwidth_bytes_per_s=bytes_per_s)
    nodes = tuple(
        Node(
            name=f"machine{index}",
            devices=(DeviceGroup(kind="even", count=1),),
            host_memory_bytes=2**40,
            num_cores=8,
            device_link=link,
            pcie=link,
            nic=link,
        )
        for index in range(count)
    )
    return Cluster(name="even", device_kinds=(kind,), nodes=nodes)


def simplified(name: str):
    """The graph, its plan on two machines, and the rate at which a step computes for 300 ms.

    ``gpt2-small`` has an output that computes nothing, ``gpt2-small untied`` one with a weight of its own.
    """
    graph = load_shipped_graph(name.split()[0])
    if name.startswith("gpt2"):
        graph = _change_output(graph, untied="untied" in name)
    plan = Plan(
        model=name,
        graph_hash=graph.content_hash,
        cluster="even",
        workload=Workload(global_batch=2, optimizer=Optimizer.named("sgd")),
        stages=tuple(StagePlan(start=i, stop=i + 1, ranks=(0, 1)) for i in range(len(graph.layers))),
        num_microbatches=2,
        schedule="interleaved",
    )
    flops_per_s = 1e12
    for _ in range(3):
        rank = simulate_plan(plan, graph, even_machines(2, 1e30, flops_per_s=flops_per_s)).ranks[0]
        flops_per_s *= (rank.forward_s + rank.backward_s) / COMPUTE_S
    return graph, plan, flops_per_s


def _change_output(graph, *, untied):
    tied = next(index for index, tensor in enumerate(graph.tensors) if tensor.aliases)
    last = max(index for index, op in enumerate(graph.ops) if tied in op.inputs)
    ops, tensors = list(graph.ops), list(graph.tensors)
    if not untied:
        ops[last] = replace(ops[last], flops=Extent(0, 0), backward_flops=Extent(0, 0))
        return replace(graph, ops=tuple(ops))
    own = len(tensors)
    swap = lambda items: tuple(own if item == tied else item for item in items)
    ops[last] = replace(ops[last], inputs=swap(ops[last].inputs), saved=swap(ops[last].saved))
    tensors.append(replace(tensors[tied], name="output.weight", aliases=(), storage=own))
    tensors[tied] = replace(tensors[tied], aliases=())
    return replace(graph, tensors=tuple(tensors), ops=tuple(ops))
