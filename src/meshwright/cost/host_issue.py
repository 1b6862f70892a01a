"""Seconds in which the host issues ops to a CUDA device, which runs them asynchronously: per op and optimizer step.

    forward      calls · forward_call_s + kernels · launch_s      calls: kernels, views and casts
    backward     nodes · node_s + kernels · launch_s              nodes: nodes of autograd's graph, including one per
                 parameter; plus `HostCalls.engine_s` once per backward
    accumulate   kernels · call_s
    optimizer    tensors · seconds of the loop per tensor

A call in a model takes several times as long as in a loop over one op: modules and the user's Python run in between,
and caches are cold. This was measured on a CPU without a GPU, the reference host, with models whose tensors are so
small that computing takes no time (``scripts/measure_host_issue.py``). The CUDA host of ``host_issue.toml`` ("the
measured host") differs by its ``speed`` and by the time of a launch. Both follow from a loop over an addition and a
loop over a linear layer, with one kernel each:

    call_s   = speed · reference.call_s   + launch_s
    linear_s = speed · reference.linear_s + launch_s

A compiled unit is one call and one node of autograd's graph. Its kernels are issued by a wrapper that inductor writes:

    forward      unit_s + extern kernels · extern_s + generated kernels · generated_s + kernels · launch_s
    backward     unit_backward_s + extern kernels · extern_backward_s + ...

These seconds, too, were measured on a CPU without a GPU (``compiled`` in ``host_issue.toml``) and are scaled by its
speed.

The launch times of the two kernels are assumed to be equal. If the product's were 2 µs longer, the computed speed of
the host would be a fifth faster, and ``engine_s``, the remainder of a backward, longer.

The views inside products and attention are counted here, because a graph does not contain them as ops (torch 2.11,
torch/csrc/autograd/FunctionsManual.cpp, aten/src/ATen/native/Linear.cpp, LinearAlgebra.cpp and
transformers/attention.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from meshwright.cost.autocast import cast_inputs
from meshwright.cost.costs import End, Interval
from meshwright.cost.op_estimates import fit_curve
from meshwright.cost.optimizers import OptimizerLoop, default_loop, measured_as, num_operations
from meshwright.cost.roofline import RooflineSeconds
from meshwright.cost.traits import family_of, operator_name, passes_of
from meshwright.spec import Graph, Measurements, Node, Op, Optimizer, decode_document
from meshwright.spec.parsing import read_data

if TYPE_CHECKING:
    from meshwright.spec.precision import Numbers

# A loop over tensors took 63 to 100 µs per tensor in four runs on one host (AdamW, as in ``host_issue.toml``): a factor
# of 1.6; models differ by 1.3 from the average of their calls. These errors are independent, so that their logarithms
# add in squares; so does a further factor of 2, a guess, for hosts of unknown speed.
_ONE_HOST = Interval(low=1 / 1.75, high=1.75)
_ANY_HOST = Interval(low=1 / 2.4, high=2.4)
# Views inside ops: `linear` with more than two dims flattens and unflattens its input; `matmul` with more than two
# expands and flattens both; attention transposes queries, keys, values and the output.
_FLATTENED, _MATMUL, _ATTENTION = 2, 5, 4
# The number of operations of the loop that `foreach_tensor_s` times (`optimizers.num_operations`).
_ADAMW_OPERATIONS = 8


# Kernels of the backward of a linear layer and the sum of its output: a product and a sum, `ones_like`, the product and
# the sum of the two gradients, and two additions to existing gradients.
_LINEAR_BACKWARD_KERNELS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceCalls:
    """Seconds of calls measured on the reference host, a CPU without a GPU.

    ``call_s``, ``linear_s``, ``linear_backward_s``: one iteration of a loop over an addition, a linear layer, and a
    linear layer's forward and backward. ``model_call_s``, ``model_node_s``: averages in models of a call in the forward
    and of an autograd node in the backward.
    """

    call_s: float
    linear_s: float
    linear_backward_s: float
    model_call_s: float
    model_node_s: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledCalls:
    """Seconds of compiled units measured on a CPU without a GPU.

    ``call_s``, ``linear_s``: seconds of an addition and of a linear layer in a loop on this CPU. ``unit_s``,
    ``unit_backward_s``: calling a unit (guards, autograd's node), and its backward. ``extern_s``,
    ``extern_backward_s``: one call of a product with the guards of its weight, and in the backward with the weight's
    gradient. ``generated_s``: one kernel that inductor generated.
    """

    call_s: float
    linear_s: float
    unit_s: float
    unit_backward_s: float
    extern_s: float
    extern_backward_s: float
    generated_s: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCalls:
    """Seconds of host calls measured on a CUDA host, and on the reference hosts without a GPU.

    ``call_s``, ``linear_s``, ``linear_backward_s``: one iteration of a loop over an addition, a linear layer, and a
    linear layer's forward and backward. ``fused_tensor_s``, ``foreach_tensor_s``: a step of AdamW per tensor, by the
    fused and by the foreach loop.
    """

    call_s: float
    linear_s: float
    linear_backward_s: float
    fused_tensor_s: float
    foreach_tensor_s: float
    source: str
    reference: ReferenceCalls
    compiled: CompiledCalls

    SCHEMA_VERSION: ClassVar[int] = 3

    @property
    def speed(self) -> float:
        """Time of a call without its launch / that of the reference host: 2 if this host takes twice as long."""
        return (self.linear_s - self.call_s) / (self.reference.linear_s - self.reference.call_s)

    @property
    def compiled_speed(self) -> float:
        """Time of a call without its launch / that of the host on which compiled units were measured."""
        return (self.linear_s - self.call_s) / (self.compiled.linear_s - self.compiled.call_s)

    @property
    def launch_s(self) -> float:
        """Seconds to launch a kernel, in addition to the call of the op."""
        return self.call_s - self.speed * self.reference.call_s

    @property
    def forward_call_s(self) -> float:
        """Seconds of one call in a model's forward, without its launch."""
        return self.speed * self.reference.model_call_s

    @property
    def node_s(self) -> float:
        """Seconds of one autograd node in a model's backward, without the launches of its kernels."""
        return self.speed * self.reference.model_node_s

    @property
    def engine_s(self) -> float:
        """Seconds to start a backward in autograd's thread and to return; on a CPU it runs in the caller's thread."""
        same = self.speed * self.reference.linear_backward_s + _LINEAR_BACKWARD_KERNELS * self.launch_s
        return self.linear_backward_s - same

    @property
    def foreach_operation_s(self) -> float:
        """Seconds per tensor of one operation of the foreach loop of an optimizer, over many tensors."""
        return self.foreach_tensor_s / _ADAMW_OPERATIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class OpIssueCounts:
    """The numbers of calls that the host makes for one op.

    ``calls``, ``kernels``: in the forward. ``nodes``, ``backward_kernels``: autograd nodes and kernels in the backward.
    ``accumulations``: gradients that are accumulated.
    """

    calls: int
    kernels: int
    nodes: int
    backward_kernels: int
    accumulations: int


@lru_cache(maxsize=1)
def load_host_calls() -> HostCalls:
    """Load the shipped measurements of host calls (``host_issue.toml``)."""
    with resources.as_file(resources.files("meshwright.cost") / "host_issue.toml") as path:
        return decode_document(HostCalls, read_data(path), path.name)


def host_factor(node: Node, end: End | None, measured_s: float = 0.0) -> float:
    """Return the time of a node's host to issue ops / that of the measured host, or one end of the factor's interval.

    ``measured_s``: seconds of a call from a measurement table, used if the node has no ``host_call_s``; 0 if unknown.
    Without both, the factor is 1.
    """
    call_s = node.host_call_s or measured_s
    factor = call_s / load_host_calls().call_s if call_s else 1.0
    interval = _ONE_HOST if call_s else _ANY_HOST
    return factor * {None: 1.0, "low": interval.low, "high": interval.high}[end]


def count_issued(graph: Graph, op: Op, size: int, dtype: str, key: str, numbers: Numbers) -> OpIssueCounts:
    """Return the numbers of calls of the host for one op, which are equal for all batch sizes.

    The arguments are those of `passes_of`.
    """
    if size == 1:
        # A batch of one sample is broadcast without a sum of its gradient; the count is for more samples.
        size, key = 2, ""
    passes = passes_of(graph, op, size, dtype, key)
    views = _inner_views(graph, op)
    casts = cast_inputs(graph, op, numbers.autocast) if numbers.autocast else []
    recorded = graph.mode == "training" and any(graph.tensors[i].requires_grad for i in op.outputs)
    returned = sum(graph.tensors[i].requires_grad for i in casts) if recorded else 0
    # One node per op, view and cast that needs a gradient, and one per parameter; attention's views are part of its
    # own.
    viewed = 0 if family_of(op) == "attention" else views
    nodes = 1 + viewed + returned + passes.accumulate.num_kernels if recorded else 0
    return OpIssueCounts(
        calls=passes.forward.num_calls + views + len(casts),
        kernels=passes.forward.num_kernels + len(casts),
        nodes=nodes,
        backward_kernels=passes.backward.num_kernels + returned,
        accumulations=passes.accumulate.num_kernels,
    )


def issue_seconds(graph: Graph, op: Op, size: int, dtype: str, key: str, numbers: Numbers) -> RooflineSeconds:
    """Return the seconds in which the measured host issues one op, which are equal for all batch sizes.

    The arguments are those of `passes_of`.
    """
    calls, issued = load_host_calls(), count_issued(graph, op, size, dtype, key, numbers)
    return RooflineSeconds(
        forward_s=issued.calls * calls.forward_call_s + issued.kernels * calls.launch_s,
        backward_s=issued.nodes * calls.node_s + issued.backward_kernels * calls.launch_s,
        accumulate_s=issued.accumulations * calls.call_s,
    )


def unit_issue_seconds(*, trained: bool) -> RooflineSeconds:
    """Return the seconds of the measured host to call a compiled unit, without its kernels.

    The backward's seconds are 0 unless ``trained``.
    """
    calls = load_host_calls()
    backward_s = calls.compiled.unit_backward_s if trained else 0.0
    unit = RooflineSeconds(forward_s=calls.compiled.unit_s, backward_s=backward_s, accumulate_s=0.0)
    return unit.times(calls.compiled_speed)


def kernel_issue_seconds(count: int, *, extern: bool, backward: bool) -> RooflineSeconds:
    """Return the seconds in which the measured host issues ``count`` kernels of one sort from a compiled unit.

    ``extern``: library kernels, not generated ones. ``backward``: whether they run in the backward.
    """
    calls = load_host_calls()
    own = calls.compiled.generated_s
    if extern:
        own = calls.compiled.extern_backward_s if backward else calls.compiled.extern_s
    seconds = count * (calls.compiled_speed * own + calls.launch_s)
    return RooflineSeconds(
        forward_s=0.0 if backward else seconds, backward_s=seconds if backward else 0.0, accumulate_s=0.0
    )


def optimizer_issue_seconds(num_tensors: int, optimizer: Optimizer, loop: OptimizerLoop) -> float:
    """Return the seconds in which the measured host issues one optimizer step over ``num_tensors`` tensors."""
    calls, operations = load_host_calls(), num_operations(optimizer)
    if loop == "fused":
        return num_tensors * calls.fused_tensor_s
    if loop == "foreach":
        return num_tensors * calls.foreach_operation_s * operations
    return num_tensors * calls.call_s * operations


def issue_step(num_tensors: int, optimizer: Optimizer, measurements: Measurements | None) -> float:
    """Return the seconds in which the measured host issues one optimizer step over tensors, by our runtime's loop.

    If ``measurements`` contain such steps, their seconds are used, scaled to the measured host.
    """
    loop = default_loop(optimizer, on_gpu=True)
    rows = measurements.optimizers if measurements is not None and measurements.host_call_s else ()
    points = [
        (row.num_tensors, row.issue_s) for row in rows if row.issue_s and row.kind == measured_as(optimizer, loop)
    ]
    if not points or measurements is None:
        return optimizer_issue_seconds(num_tensors, optimizer, loop)
    seconds = float(fit_curve(points).at(np.array([num_tensors], np.float64))[0])
    return seconds * load_host_calls().call_s / measurements.host_call_s


def _inner_views(graph: Graph, op: Op) -> int:
    """Return the number of views that an op makes of its inputs and outputs and that a graph does not contain."""
    name = operator_name(op)
    dims = max((len(graph.tensors[i].shape) for i in op.inputs), default=0)
    if name == "linear":
        return 1 + (_FLATTENED if dims > 2 else 0)
    if name == "matmul":
        return _MATMUL if dims > 2 else 0
    return _ATTENTION if family_of(op) == "attention" else 0
