"""`differentiate(captured)`: forward and backward pass as one graph of elementary operators, for cost analysis.

The captured ops run once on fake tensors, with a symbolic batch size, under `make_fx`; then `torch.autograd.grad` of
the loss runs. Ops recorded by `grad` are the backward phase. Each backward op belongs to the module and layer
of the forward op whose gradient it computes; to know it, autograd's nodes are labelled as the forward pass makes them.
The fake tensors are on the CPU and not on device "meta", where some losses lose their backward pass (torch 2.13).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree

from meshwright.capture.describe import GraphWithTable, NotAffineError, describe_trace
from meshwright.capture.graph_walk import FlatTrace, target_of
from meshwright.capture.layer_division import Range, number_names
from meshwright.capture.surroundings import quiet_torch
from meshwright.capture.value_looks import ValueLooks
from meshwright.spec import CaptureError, Graph, Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.capture.capture import Captured


@dataclass(frozen=True, slots=True)
class _Label:
    """Whose work an op of the joint graph is."""

    module: str
    layer: str
    backward: bool


def differentiate(captured: Captured) -> Graph:
    """Return the joint forward-backward graph of a captured model.

    The outputs are the loss, then the gradient of each trainable parameter on which the loss depends. Raises
    CaptureError if the graph has no loss, or if such a parameter gets no gradient.
    """
    if not (captured.graph.has_loss and captured.graph.mode == "training"):
        raise CaptureError(
            f'Graph {captured.graph.name!r} has no loss to differentiate; capture the model with mode="training" and '
            "loss=..."
        )
    wanted = _expected_gradients(captured.graph)
    with quiet_torch():
        try:
            described = _describe(captured, wanted, symbolic=not captured.trace.fixed)
        except NotAffineError:
            described = _describe(captured, wanted, symbolic=False)
    gradients = set(described.graph.outputs[1:])
    tensors = tuple(
        replace(tensor, role="gradient") if i in gradients and tensor.role == "activation" else tensor
        for i, tensor in enumerate(described.graph.tensors)
    )
    return replace(described.graph, tensors=tensors, mode="training", has_loss=True)


def _describe(captured: Captured, wanted: tuple[str, ...], *, symbolic: bool) -> GraphWithTable:
    trace, labels = _trace_joint(captured, wanted, symbolic)

    def divide(_ops: Sequence[Op], _tensors: Any, nodes: Sequence[fx.Node]) -> tuple[Range, ...]:
        ranges: list[Range] = []
        for position, node in enumerate(nodes):
            label = labels[node]
            name = f"{label.layer} backward" if label.backward else label.layer
            if ranges and ranges[-1].name == name:
                ranges[-1] = replace(ranges[-1], stop=position + 1)
            else:
                ranges.append(Range(name=name, start=position, stop=position + 1))
        return tuple(number_names(ranges))

    return describe_trace(trace, captured.graph.name, divide)


def _expected_gradients(graph: Graph) -> tuple[str, ...]:
    """Names of the trainable parameters that the loss depends on through values that autograd follows."""
    producer = {i: op for op in graph.ops for i in op.outputs}
    writers: dict[int, list[Op]] = {}
    for op in graph.ops:
        for i in op.outputs:
            if graph.tensors[i].storage != i:
                writers.setdefault(graph.tensors[i].storage, []).append(op)
    todo, seen = [graph.outputs[0]], set()
    while todo:
        i = todo.pop()
        if i in seen or not graph.tensors[i].requires_grad:
            continue
        seen.add(i)
        for op in (*((producer[i],) if i in producer else ()), *writers.get(graph.tensors[i].storage, ())):
            todo += op.inputs
    return tuple(graph.tensors[i].name for i in graph.parameters if i in seen)


def _trace_joint(
    captured: Captured, wanted: tuple[str, ...], symbolic: bool
) -> tuple[FlatTrace, dict[fx.Node, _Label]]:
    trace = captured.trace
    recorder = _Recorder(captured, wanted)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    batch = [
        _fake_input(mode, value, grows and symbolic) for value, grows in zip(trace.values, trace.batched, strict=True)
    ]
    with mode:
        state = [ValueLooks.of(tensor).empty() for tensor in trace.state.values()]
        joint = make_fx(recorder.run)(*state, *batch)
    missing = [name for name, present in zip(wanted, recorder.present, strict=True) if not present]
    if missing:
        raise CaptureError(
            f"{captured.graph.name}: parameter {missing[0]!r} gets no gradient although the loss depends on it; this "
            "is a defect of the capture. Please report it with the model."
        )
    return _as_trace(trace, joint, recorder, symbolic)


def _fake_input(mode: FakeTensorMode, value: ValueLooks, open_batch: bool) -> torch.Tensor:
    looks = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
    sizes = [DimDynamic.DYNAMIC if open_batch and i == 0 else DimDynamic.STATIC for i in range(looks.ndim)]
    fake = mode.from_tensor(looks, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))
    with mode:
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="cpu")


class _Recorder:
    """Runs the captured ops and their gradients while `make_fx` records, and labels what is recorded."""

    def __init__(self, captured: Captured, wanted: tuple[str, ...]) -> None:
        self._captured, self._wanted = captured, wanted
        self.labels: dict[fx.Node, _Label] = {}
        self.present: list[bool] = []
        self._autograd: dict[Any, _Label] = {}
        graph = captured.graph
        layer_of = [layer.name for layer in graph.layers for _ in range(layer.start, layer.stop)]
        self._home = {
            row.node: _Label(graph.ops[i].module, layer_of[i], False) for i, row in enumerate(captured.table.ops)
        }
        self._label = _Label("", layer_of[0], False)
        self._graph: fx.Graph | None = None

    def run(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        trace = self._captured.trace
        mode = get_proxy_mode()
        if mode is None:
            raise RuntimeError("make_fx is not recording")
        self._graph = mode.tracer.graph
        names = list(trace.state)
        state = dict(zip(names, tensors[: len(names)], strict=True))
        batch = iter(tensors[len(names) :])
        env: dict[fx.Node, Any] = {}
        for node in trace.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(batch)
            elif node.op == "get_attr":
                env[node] = state[node.target] if node.target in state else trace.attribute(node.target)
            elif node.op == "call_function":
                env[node] = self._call(node, env)
        output = next(node for node in trace.graph.nodes if node.op == "output")
        loss = env[output.args[0][0]]
        return loss, *self._gradients(loss, [state[name] for name in self._wanted])

    def _call(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        self._switch(self._home.get(node, self._label))
        target = target_of(node)
        args: Any = fx.node.map_arg(node.args, env.__getitem__)
        kwargs: Any = fx.node.map_arg(node.kwargs, env.__getitem__)
        if target is torch.ops.aten.sym_size.int:
            return args[0].shape[args[1]]
        if isinstance(target, torch._ops.HigherOrderOperator) and target.name() != "cond":
            # wrap_with_set_grad_enabled(enabled, branch, *operands) is written out.
            with torch.set_grad_enabled(args[0]):
                out = args[1](*args[2:])
        else:
            out = target(*args, **kwargs)
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                self._claim(leaf.grad_fn)
        return out

    def _claim(self, autograd_node: Any) -> None:
        """Label autograd's new nodes with the op that made them."""
        todo = [autograd_node]
        while todo:
            item = todo.pop()
            if item is None or item in self._autograd:
                continue
            self._autograd[item] = replace(self._label, backward=True)
            todo += [following for following, _ in item.next_functions]

    def _gradients(self, loss: torch.Tensor, parameters: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        self._switch(replace(self._label, backward=True))
        for item, label in self._autograd.items():
            item.register_prehook(partial(self._begin, label))
        found: tuple[torch.Tensor | None, ...] = ()
        if parameters:
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
        self._switch(self._label)
        self.present = [gradient is not None for gradient in found]
        return tuple(gradient for gradient in found if gradient is not None)

    def _begin(self, label: _Label, _gradients: Any) -> None:
        self._switch(label)

    def _switch(self, label: _Label) -> None:
        """Give what was recorded since the last switch its label."""
        assert self._graph is not None
        for node in reversed(self._graph.nodes):
            if node in self.labels:
                break
            self.labels[node] = self._label
        self._label = label


def _as_trace(
    trace: FlatTrace, joint: fx.GraphModule, recorder: _Recorder, symbolic: bool
) -> tuple[FlatTrace, dict[fx.Node, _Label]]:
    """The recorded graph as a trace over the same state and inputs, without autograd."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    labels: dict[fx.Node, _Label] = {}
    names = iter(trace.state)
    constants: dict[str, torch.Tensor] = {}
    branches: dict[str, fx.GraphModule] = {}
    recorded = {node.name: label for node, label in recorder.labels.items()}
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            name = next(names, None)
            env[node] = graph.placeholder(node.name) if name is None else graph.create_node("get_attr", name)
        elif node.op == "get_attr":
            held = getattr(joint, node.target)
            name = f"branch_{len(branches)}" if isinstance(held, fx.GraphModule) else f"constant_{len(constants)}"
            (branches if isinstance(held, fx.GraphModule) else constants)[name] = held
            env[node] = graph.create_node("get_attr", name)
        elif node.op == "output":
            graph.output(tuple(env[leaf] for leaf in node.args[0]))
        else:
            env[node] = graph.node_copy(node, env.__getitem__)
            label = labels[env[node]] = recorded[node.name]
            env[node].meta = {"module": label.module, "where": "", "phase": "backward" if label.backward else "forward"}
    flat = replace(
        trace,
        graph=graph,
        constants=constants,
        branches=branches,
        training=False,
        batched=trace.batched if symbolic else (False,) * len(trace.batched),
        facts={},
    )
    return flat, labels
