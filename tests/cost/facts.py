"""Clusters, graphs and tables with round numbers, so that costs can be worked out by hand."""

from dataclasses import replace

from meshwright.spec import (
    Cluster,
    DeviceGroup,
    DeviceKind,
    Extent,
    Graph,
    Layer,
    Link,
    Measurements,
    Node,
    Op,
    OpMeasurement,
    Tensor,
    TransferMeasurement,
    op_key,
)

B = Extent(0, 1)
KIND = DeviceKind(
    name="box",
    memory_bytes=2**34,
    memory_bandwidth_bytes_per_s=1e9,
    peak_flops_per_s={"float32": 1e9, "bfloat16": 4e9},
    source="made up",
)


def make_cluster(num_nodes=1, num_devices=4):
    node = Node(
        name="node",
        devices=(DeviceGroup(kind="box", count=num_devices),),
        host_memory_bytes=2**35,
        num_cores=8,
        device_link=Link(latency_s=1e-6, bandwidth_bytes_per_s=1e9),
        pcie=Link(latency_s=1e-6, bandwidth_bytes_per_s=1e9),
        nic=Link(latency_s=10e-6, bandwidth_bytes_per_s=1e8),
    )
    nodes = tuple(replace(node, name=f"node{i}") for i in range(num_nodes))
    return Cluster(name="test", device_kinds=(KIND,), nodes=nodes)


class GraphMaker:
    """Collects tensors and ops; every op is a layer of its own."""

    def __init__(self, mode="training"):
        self.tensors, self.ops, self.mode = [], [], mode

    def tensor(self, name, shape, role="activation", dtype="float32", grad=True, storage=None):
        number = len(self.tensors)
        self.tensors.append(
            Tensor(
                name=name,
                shape=tuple(item if isinstance(item, Extent) else Extent(item) for item in shape),
                dtype=dtype,
                role=role,
                storage=number if storage is None else storage,
                requires_grad=grad,
            )
        )
        return number

    def op(self, kind, inputs, outputs, **facts):
        self.ops.append(Op(name=f"op{len(self.ops)}", kind=kind, inputs=inputs, outputs=outputs, **facts))

    def graph(self, **facts):
        return Graph(
            name="made",
            tensors=tuple(self.tensors),
            ops=tuple(self.ops),
            layers=tuple(Layer(name=op.name, start=i, stop=i + 1) for i, op in enumerate(self.ops)),
            inputs=tuple(i for i, tensor in enumerate(self.tensors) if tensor.role == "input"),
            outputs=self.ops[-1].outputs,
            mode=self.mode,
            **facts,
        )


def linear_graph(mode="training"):
    """x (b, 8) → linear to (b, 4), which saves x → view as (2b, 2) → relu."""
    make = GraphMaker(mode)
    x = make.tensor("x", (B, 8), role="input", grad=False)
    weight = make.tensor("weight", (4, 8), role="parameter")
    y = make.tensor("y", (B, 4))
    flops = {"flops": Extent(0, 64), "backward_flops": Extent(0, 64)}
    make.op("aten.linear.default", (x, weight), (y,), saved=(x,), **flops)
    view = make.tensor("view", (Extent(0, 2), 2), storage=y)
    make.op("aten.view.default", (y,), (view,))
    z = make.tensor("z", (Extent(0, 2), 2))
    make.op("aten.relu.default", (view,), (z,), saved=(z,))
    return make.graph()


def make_table(ops=(), transfers=(), optimizers=(), device="box"):
    return Measurements(
        device=device, software="none", date="never", ops=ops, transfers=transfers, optimizers=optimizers
    )


def op_row(graph, index, batch_size, forward_s, backward_s=0.0, accumulate_s=0.0, dtype="float32"):
    key = op_key(graph, graph.ops[index], batch_size).replace("float32", dtype)
    return OpMeasurement(key=key, forward_s=forward_s, backward_s=backward_s, accumulate_s=accumulate_s, num_samples=1)


def transfer_row(kind, num_ranks, num_bytes, seconds, host_s=0.0):
    return TransferMeasurement(kind=kind, num_ranks=num_ranks, num_bytes=num_bytes, seconds=seconds, host_s=host_s)


def never_measured(cluster):
    """The same cluster of a kind of device that no public table knows."""
    kinds = tuple(replace(kind, name=f"{kind.name}-like") for kind in cluster.device_kinds)
    nodes = tuple(
        replace(node, devices=tuple(replace(group, kind=f"{group.kind}-like") for group in node.devices))
        for node in cluster.nodes
    )
    return replace(cluster, device_kinds=kinds, nodes=nodes)
