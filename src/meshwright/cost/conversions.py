"""What a precision adds to the ops of a graph: casts of inputs, and gradients in a wider type than they are made in.

    forward      under autocast, inputs that an op computes in another type are read and written
    backward     the same way back for those that want a gradient; a gradient of a parameter that is kept in a wider
                 type is read and written once
    accumulate   a gradient of the wider type is read, as is the sum, and the sum written

One kernel each. A parameter that several ops read is counted with each of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright.cost.autocast import cast_inputs, compute_type
from meshwright.cost.roofline import LAUNCH_S, OpSeconds
from meshwright.spec.units import DTYPE_BYTES

if TYPE_CHECKING:
    from meshwright.cost.prediction import Interval
    from meshwright.cost.prices import OpPrice
    from meshwright.spec import DeviceKind, Graph, Op
    from meshwright.spec.precision import Numbers


def op_type(graph: Graph, op: Op, numbers: Numbers) -> str:
    """The type in which an op computes."""
    return compute_type(graph, op, numbers.autocast) if numbers.autocast else numbers.values


def with_conversions(
    price: OpPrice, graph: Graph, op: Op, batch_size: int, kind: DeviceKind, numbers: Numbers, unsure: Interval
) -> OpPrice:
    """The price of an op and of the conversions around it, which have the interval ``unsure``."""
    added = _conversion_seconds(graph, op, batch_size, kind, numbers)
    if added is None:
        return price
    low, high = (added.scaled(end, end, end) for end in (unsure.low, unsure.high))
    return replace(price, seconds=_sum(price.seconds, added), low=_sum(price.low, low), high=_sum(price.high, high))


def _conversion_seconds(graph: Graph, op: Op, batch_size: int, kind: DeviceKind, numbers: Numbers) -> OpSeconds | None:
    forward, backward, accumulate = [], [], []
    trained = graph.mode == "training" and any(graph.tensors[i].requires_grad for i in op.outputs)
    if numbers.autocast:
        width = DTYPE_BYTES[compute_type(graph, op, numbers.autocast)]
        for i in cast_inputs(graph, op, numbers.autocast):
            tensor = graph.tensors[i]
            num_bytes = tensor.num_elements(batch_size) * (width + DTYPE_BYTES[tensor.dtype])
            forward.append(num_bytes)
            if trained and tensor.requires_grad:
                backward.append(num_bytes)
    if trained and numbers.gradient_bytes > numbers.value_bytes:
        for i in dict.fromkeys(op.inputs):
            tensor = graph.tensors[i]
            if tensor.role == "parameter" and tensor.requires_grad:
                elements = tensor.num_elements(0)
                backward.append(elements * (numbers.gradient_bytes + numbers.value_bytes))
                accumulate.append(3 * elements * (numbers.gradient_bytes - numbers.value_bytes))
    if not (forward or backward or accumulate):
        return None
    bandwidth = kind.memory_bandwidth_bytes_per_s
    return OpSeconds(
        forward_s=sum(forward) / bandwidth + LAUNCH_S * len(forward),
        backward_s=sum(backward) / bandwidth + LAUNCH_S * len(backward),
        # The kernel that adds is counted with the op.
        accumulate_s=sum(accumulate) / bandwidth,
    )


def _sum(one: OpSeconds, other: OpSeconds) -> OpSeconds:
    return OpSeconds(
        forward_s=one.forward_s + other.forward_s,
        backward_s=one.backward_s + other.backward_s,
        accumulate_s=one.accumulate_s + other.accumulate_s,
    )
