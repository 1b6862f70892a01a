"""Costs that a precision adds to ops: data types of the computation, casts, and gradients in wider types.

    forward      under autocast, an input that the op computes in another type is read and written (a cast)
    backward     the reverse cast of each input that needs a gradient, also where the op itself widens the input;
                 a parameter's gradient that is kept in a wider type is read and written once; on GPUs, the gradient
                 of an input that several ops read is added to the gradients of these ops
    accumulate   a gradient of the wider type and the sum are read, and the sum is written

Each of these is one kernel. Its time is measured (`OpTable.moved`); else it is computed with the datasheet's memory
bandwidth, on GPUs with fitted rates (`cost.gpu`). A parameter that several ops read is counted with each op. On CPUs,
rooflines do not count sums of gradients.

A matrix product in float8 reads its first factor once more to find the largest value; the cast of this factor is part
of the product's kernel. The second factor is read to find the largest value, then read and written. The backward has
two more products. Their second factors are the weight and the input, whose largest values are known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.cost.autocast import Widths, cast_inputs, compute_type
from meshwright.cost.costs import OpCost, op_cost_around
from meshwright.cost.gpu.launches import copied, sum_of
from meshwright.cost.op_estimates import OpTable, roofline_interval
from meshwright.cost.roofline import LAUNCH_S, RooflineSeconds
from meshwright.cost.traits import family_of, operator_name
from meshwright.spec import DTYPE_BYTES, DeviceKind, Graph, Op

if TYPE_CHECKING:
    from meshwright.cost.gpu.gpu_products import GpuModel, Launch
    from meshwright.spec.precision import Numbers


_FLOAT8 = "float8_e4m3fn"
# Sizes of the factors of `torch._scaled_mm` must be multiples of this.
_FLOAT8_MULTIPLE = 16
_LINEAR = frozenset({"linear", "mm", "addmm"})
# Families that cuDNN computes, in TF32 unless the process disabled it (torch.backends.cudnn.allow_tf32).
_BY_CUDNN = ("convolution", "recurrent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """An additional kernel of an op that copies, casts or adds the elements of a tensor.

    ``elements``: number of elements. ``read`` and ``written``: bytes per element that the kernel reads and writes (0 if
    it writes nothing). ``adds``: whether the kernel adds to existing values of the same type.
    """

    elements: int
    read: int
    written: int
    adds: bool = False

    @property
    def launch(self) -> Launch:
        """The kernel as a `Launch`: the bytes that it reads and writes."""
        if self.adds:
            return sum_of(self.elements, self.written)
        return copied(self.elements, self.read, self.written)


def op_type(graph: Graph, op: Op, numbers: Numbers) -> str:
    """Return the data type in which an op computes in a precision."""
    return compute_type(graph, op, numbers.autocast) if numbers.autocast else numbers.values


def product_type(graph: Graph, op: Op, numbers: Numbers, kind: DeviceKind) -> str:
    """Return the data type of an op's tensor-core products, "tf32" or float8; "" for the op's own type.

    It is also "" if the device kind has no peak FLOP/s for the type of the products.
    """
    if numbers.products == _FLOAT8:
        is_narrow = operator_name(op) in _LINEAR and _weight_fits(graph, op)
    else:
        chosen = numbers.products == "tf32" and family_of(op) == "product"
        is_narrow = (chosen or is_tf32_by_default(op)) and op_type(graph, op, numbers) == "float32"
    dtype = numbers.products or "tf32"
    return dtype if is_narrow and dtype in kind.peak_flops_per_s else ""


def is_tf32_by_default(op: Op) -> bool:
    """Return whether torch computes a float32 op in TF32 by default: convolutions and recurrent ops, by cuDNN.

    Such ops were measured with this default.
    """
    return family_of(op) in _BY_CUDNN


def _factors(op: Op) -> tuple[int, int]:
    """Return the input and the weight of a linear layer."""
    first = 1 if operator_name(op) == "addmm" else 0
    return op.inputs[first], op.inputs[first + 1]


def _weight_fits(graph: Graph, op: Op) -> bool:
    """Return whether the weight of a linear layer is a parameter with sizes that float8 products support."""
    weight = graph.tensors[_factors(op)[1]]
    is_parameter = graph.tensors[weight.storage].role == "parameter"
    return is_parameter and all(extent.at(1) % _FLOAT8_MULTIPLE == 0 for extent in weight.shape)


def with_conversions(
    cost: OpCost,
    graph: Graph,
    op: Op,
    batch_size: int,
    kind: DeviceKind,
    numbers: Numbers,
    gpu: GpuModel | None,
    widths: Widths,
    added: tuple[int, ...],
    table: OpTable | None,
) -> OpCost:
    """Return the cost of an op plus the cost of the dtype conversions around it.

    The time of a conversion is the measured one of ``table``, else the estimate of ``gpu``; if both are missing, it
    follows from the memory bandwidth. ``added``: positions in ``op.inputs`` of the inputs whose gradient is added to an
    existing one.
    """
    places = added if gpu is not None else ()
    forward, backward, widened = moves_beside(
        graph, op, batch_size, kind, numbers, widths, places, widens=cost.basis != "measured"
    )
    if not (forward or backward or widened):
        return cost
    bandwidth, interval = kind.memory_bandwidth_bytes_per_s, roofline_interval(kind)

    def seconds_of(move: Move) -> float:
        measured = table.moved(move) if table is not None else None
        if measured is not None:
            return measured
        one = move.launch
        return gpu.seconds([one], kind) if gpu is not None else (one.cold + one.hot) / bandwidth + LAUNCH_S

    parts = [sum(map(seconds_of, moves)) for moves in (forward, backward)]
    if gpu is not None:
        bandwidth, interval = bandwidth * gpu.rate("pointwise", 4).share(1), gpu.basis_on(kind)[1]
    # The kernel that adds is counted with the op.
    seconds = RooflineSeconds(forward_s=parts[0], backward_s=parts[1], accumulate_s=widened / bandwidth)
    return cost.plus(seconds, interval)


def moves_beside(
    graph: Graph,
    op: Op,
    batch_size: int,
    kind: DeviceKind,
    numbers: Numbers,
    widths: Widths,
    added: tuple[int, ...] = (),
    *,
    widens: bool = True,
) -> tuple[list[Move], list[Move], float]:
    """Return the conversion kernels around an op: of its forward, of its backward, and bytes to accumulate gradients.

    The bytes (a float) are those that gradients of a wider type add to the accumulation. Arguments are those of
    `with_conversions`. ``widens``: include inputs that the op itself widens; a measured op's own time contains them.
    """
    trained = graph.mode == "training" and any(graph.tensors[i].requires_grad for i in op.outputs)
    forward: list[Move] = []
    backward: list[Move] = []
    widened = 0.0

    def move(elements: int, read: int, written: int) -> Move:
        return Move(elements=elements, read=read, written=written)

    if product_type(graph, op, numbers, kind) == _FLOAT8:
        read, given, made = (graph.tensors[i].num_elements(batch_size) for i in (*_factors(op), op.outputs[0]))
        width, narrow = numbers.value_bytes, DTYPE_BYTES[_FLOAT8]
        forward += [move(read, width, 0), move(given, width, 0), move(given, width, narrow)]
        if trained:
            backward += [move(made, width, 0), move(given, width, narrow), move(read, width, narrow)]
    cast = cast_inputs(graph, op, numbers.autocast) if numbers.autocast else []
    if cast:
        width = DTYPE_BYTES[compute_type(graph, op, numbers.autocast)]
        for i in cast:
            tensor = graph.tensors[i]
            own = DTYPE_BYTES[tensor.dtype]
            forward.append(move(tensor.num_elements(batch_size), own, width))
            if trained and tensor.requires_grad:
                backward.append(move(tensor.num_elements(batch_size), width, own))
    if trained and widens and family_of(op) == "pointwise":
        backward += _widened(graph, op, batch_size, widths, cast)
    if trained:
        copies, widened = _widened_gradients(graph, op, numbers)
        backward += [*copies, *_sums(graph, op, batch_size, widths, added)]
    return forward, backward, widened


def widened_gradients(graph: Graph, op: Op, kind: DeviceKind, numbers: Numbers, gpu: GpuModel | None) -> OpCost | None:
    """Return the cost of copying an op's parameter gradients to a wider type on a GPU; None if nothing is copied.

    Without a ``gpu`` model (a CPU), the result is None, too.
    """
    if gpu is None or graph.mode != "training":
        return None
    copies, _ = _widened_gradients(graph, op, numbers)
    if not copies:
        return None
    basis, interval = gpu.basis_on(kind)
    backward_s = gpu.seconds([item.launch for item in copies], kind)
    return op_cost_around(RooflineSeconds(forward_s=0.0, backward_s=backward_s, accumulate_s=0.0), interval, basis)


def _widened_gradients(graph: Graph, op: Op, numbers: Numbers) -> tuple[list[Move], float]:
    """Return copies of gradients of parameters to a wider type, and additional bytes to accumulate such gradients."""
    copies, widened = [], 0.0
    if numbers.gradient_bytes > numbers.value_bytes:
        for i in dict.fromkeys(op.inputs):
            tensor = graph.tensors[i]
            if tensor.role == "parameter" and tensor.requires_grad:
                elements = tensor.num_elements(0)
                copies.append(Move(elements=elements, read=numbers.value_bytes, written=numbers.gradient_bytes))
                widened += 3 * elements * (numbers.gradient_bytes - numbers.value_bytes)
    return copies, widened


def _widened(graph: Graph, op: Op, batch_size: int, widths: Widths, cast: list[int]) -> list[Move]:
    """Return gradients of inputs that an op itself widens, except inputs that are cast before it."""
    made = widths.of(op.outputs[0])
    wanted = dict.fromkeys(i for i in op.inputs if i not in cast and graph.tensors[i].requires_grad)
    return [
        Move(elements=graph.tensors[i].num_elements(batch_size), read=made, written=widths.of(i))
        for i in wanted
        if widths.of(i) < made
    ]


def _sums(graph: Graph, op: Op, batch_size: int, widths: Widths, added: tuple[int, ...]) -> list[Move]:
    found = [(graph.tensors[i].num_elements(batch_size), widths.of(i)) for i in (op.inputs[place] for place in added)]
    return [Move(elements=elements, read=width, written=width, adds=True) for elements, width in found]
