"""How long the host takes to issue ops to a CUDA device, which runs them later: seconds per op and per optimizer step.

    forward      calls · call_s + nodes · node_s     calls: kernels, views and casts; nodes: those of autograd's graph
    backward     calls · call_s + nodes · node_s     and `HostCalls.engine_s` once per backward
    accumulate   kernels · call_s
    optimizer    tensors · seconds of the loop per tensor

What one call takes is measured (``host_issue.toml``). With what torch calls in a linear layer of two dims (`t`,
`addmm`), in the sum of its output and in their backward (`ones_like`, `expand`, `t`, `mm`, `sum`, `t` and two
additions to gradients, by nodes Sum, Addmm, T and twice AccumulateGrad), two more follow:

    linear_s          = 2 call_s + 2 node_s
    linear_backward_s = linear_s + (call_s + node_s) + 8 call_s + 5 node_s + engine_s

Source of the calls: torch 2.11, torch/csrc/autograd/FunctionsManual.cpp, aten/src/ATen/native/Linear.cpp,
LinearAlgebra.cpp and transformers/attention.cpp. The views inside of products are counted here, for ops of a graph hide
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, ClassVar

from meshwright.cost.autocast import cast_inputs
from meshwright.cost.optimizers import num_operations
from meshwright.cost.prediction import Interval
from meshwright.cost.roofline import OpSeconds
from meshwright.cost.traits import family_of, operator_name, passes_of
from meshwright.spec.codec import decode_document
from meshwright.spec.parsing import read_data

if TYPE_CHECKING:
    from meshwright.cost.optimizers import OptimizerLoop
    from meshwright.cost.prices import End
    from meshwright.spec import Graph, Node, Op, Optimizer
    from meshwright.spec.precision import Numbers

# One loop over tensors took 63 to 100 µs per tensor in four runs on one host (AdamW, as in ``host_issue.toml``): 1.6.
_ONE_HOST = Interval(low=1 / 1.6, high=1.6)
# Of hosts that do not say how fast they are a further factor of 2 is assumed, which is a guess and no measurement: the
# two are independent, so that their logarithms add up in squares.
_ANY_HOST = Interval(low=1 / 2.3, high=2.3)
# Views inside of ops: `linear` of more than two dims flattens and unflattens its input; `matmul` of more than two
# expands and flattens both; attention transposes queries, keys, values and what comes out.
_FLATTENED, _MATMUL, _ATTENTION = 2, 5, 4
# Operations of the loop of which `foreach_tensor_s` is (`optimizers.num_operations`).
_ADAMW_OPERATIONS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCalls:
    """What was measured: an addition, a linear layer, its forward and backward, a step of AdamW per tensor."""

    call_s: float
    linear_s: float
    linear_backward_s: float
    fused_tensor_s: float
    foreach_tensor_s: float
    source: str

    SCHEMA_VERSION: ClassVar[int] = 1

    @property
    def node_s(self) -> float:
        """Seconds to record or to run one node of autograd's graph, beside its calls."""
        return (self.linear_s - 2 * self.call_s) / 2

    @property
    def engine_s(self) -> float:
        """Seconds to hand a backward to autograd's thread and to come back."""
        return self.linear_backward_s - self.linear_s - 9 * self.call_s - 6 * self.node_s

    @property
    def foreach_operation_s(self) -> float:
        """Seconds per tensor of one operation over many."""
        return self.foreach_tensor_s / _ADAMW_OPERATIONS


@lru_cache(maxsize=1)
def load_host_calls() -> HostCalls:
    """The measurements, as shipped."""
    with resources.as_file(resources.files("meshwright.cost") / "host_issue.toml") as path:
        return decode_document(HostCalls, read_data(path), path.name)


def host_factor(node: Node, end: End | None) -> float:
    """How many times as long as the measured host that of a node takes; or the end of that."""
    factor = node.host_call_s / load_host_calls().call_s if node.host_call_s else 1.0
    interval = _ONE_HOST if node.host_call_s else _ANY_HOST
    return factor * {None: 1.0, "low": interval.low, "high": interval.high}[end]


def issue_seconds(graph: Graph, op: Op, size: int, dtype: str, key: str, numbers: Numbers) -> OpSeconds:
    """Seconds of the measured host for one op, the same for every batch ``size``; arguments as of `passes_of`."""
    calls = load_host_calls()
    passes = passes_of(graph, op, size, dtype, key)
    views = _inner_views(graph, op)
    casts = cast_inputs(graph, op, numbers.autocast) if numbers.autocast else []
    recorded = graph.mode == "training" and any(graph.tensors[i].requires_grad for i in op.outputs)
    returned = [i for i in casts if graph.tensors[i].requires_grad] if recorded else []
    backward_calls = passes.backward.num_calls
    if recorded:
        # Each gradient of a product takes the other factor transposed.
        transposed = passes.backward.num_kernels if family_of(op) == "product" else 0
        backward_calls += views + transposed + len(returned)
    # One node per op, view and cast that needs a gradient, and one that adds to each parameter's.
    nodes = (1 + views + len(returned)) if recorded else 0
    gathered = passes.accumulate.num_kernels
    return OpSeconds(
        forward_s=(passes.forward.num_calls + views + len(casts)) * calls.call_s + nodes * calls.node_s,
        backward_s=backward_calls * calls.call_s + (nodes + gathered) * calls.node_s,
        accumulate_s=gathered * calls.call_s,
    )


def optimizer_issue_seconds(num_tensors: int, optimizer: Optimizer, loop: OptimizerLoop) -> float:
    """Seconds of the measured host for one step over so many tensors."""
    calls, operations = load_host_calls(), num_operations(optimizer)
    if loop == "fused":
        return num_tensors * calls.fused_tensor_s
    if loop == "foreach":
        return num_tensors * calls.foreach_operation_s * operations
    return num_tensors * calls.call_s * operations


def _inner_views(graph: Graph, op: Op) -> int:
    """Views that an op makes of its inputs and outputs and a graph does not have."""
    name = operator_name(op)
    dims = max((len(graph.tensors[i].shape) for i in op.inputs), default=0)
    if name == "linear":
        return 1 + (_FLATTENED if dims > 2 else 0)
    if name == "matmul":
        return _MATMUL if dims > 2 else 0
    return _ATTENTION if family_of(op) == "attention" else 0
