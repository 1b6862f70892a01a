"""Capture a model on an example batch (`capture_model`), and compare the captured model with it (`verify_capture`).

`check_capture` does the comparison later; `explain_calls` compares the operators that both dispatch; `flatten_batch`
returns a batch's tensors in the order of the graph's inputs.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.capture.call_facts import Legality
from meshwright.capture.describe import GraphWithTable, NotAffineError, describe_trace
from meshwright.capture.export import split_batch, trace_model
from meshwright.capture.graph_walk import CaptureTable, FlatTrace
from meshwright.capture.layer_division import find_units
from meshwright.capture.module_devices import CPU
from meshwright.capture.module_parts import part
from meshwright.capture.refusals import StateWatch, explain_checkpoint, refuse_frozen
from meshwright.capture.surroundings import holds_data, kept_buffers, quiet_torch, training_flags
from meshwright.spec import CaptureError, EventSink, Graph, NullSink
from meshwright.spec.own_code import own_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


_FREE = frozenset(
    ("alias", "as_strided", "detach", "expand", "lift_fresh", "permute", "select", "slice", "split", "split_with_sizes",
     "squeeze", "t", "transpose", "unbind", "unsqueeze", "view", "_assert_tensor_metadata", "_reshape_alias",
     "_unsafe_view")
)  # fmt: skip
# One operator under two names: ours has shapes for tensors without data (`surroundings`).
_SAME = {"_grouped_mm": "grouped_mm"}
# The remark names at most this many modules, and operators of each.
_TOLD_MODULES, _TOLD_OPERATORS = 3, 4

# An operator, and the shapes and dtypes of its results.
_Call = tuple[str, tuple[tuple[tuple[int, ...], torch.dtype], ...]]


class Dispatched(TorchDispatchMode):
    """Counts the operators that torch dispatches in a call, by module path ("" is the model itself).

    Each `counting` or `run` starts from zero, so that after several of them only the last one counts: a first call of a
    model may create tables that later calls reuse.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, Counter[_Call]] = {}
        self._module = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count a call, and let it happen."""
        made = func(*args, **(kwargs or {}))
        name = func._schema.name.rpartition("::")[2]
        if name not in _FREE:
            looks = tuple(
                (tuple(item.shape), item.dtype) for item in pytree.tree_leaves(made) if isinstance(item, torch.Tensor)
            )
            self.calls.setdefault(self._module, Counter())[_SAME.get(name, name), looks] += 1
        return made

    @contextmanager
    def counting(self, model: nn.Module) -> Iterator[None]:
        """Count the operators that ``model`` dispatches while the context is open."""
        self.calls.clear()
        path = [""]

        def enter(name: str) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                path.append(name)
                self._module = name

            return hook

        def leave(*_: Any) -> None:
            path.pop()
            self._module = path[-1]

        with ExitStack() as stack:
            for name, module in model.named_modules():
                stack.callback(module.register_forward_pre_hook(enter(name)).remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
            stack.enter_context(self)
            yield

    def run(self, part: fx.GraphModule, modules: Mapping[str, str], batch: Sequence[torch.Tensor]) -> Any:
        """Run a part of a captured model on a batch, count the operators that it dispatches, and return its outputs.

        ``modules``: by node name, the path of the module to which the node's operators are assigned.
        """
        dispatched = self
        self.calls.clear()

        class Interpreter(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                dispatched._module = modules.get(n.name, "")
                return super().run_node(n)

        with self:
            return Interpreter(part).run(*batch)


# Libraries may take other branches while a model is traced, with equal results and other costs. So what torch
# dispatches is counted while graph and model run on small batches: calls by module, operator and shapes of results.
# Views are free. Checks on whole numbers (are these positions packed?) are left out of the graph; they compute nothing
# that it needs.
def explain_calls(model: Dispatched, graph: Dispatched) -> str:
    """Return a sentence on operators that only the model or only its captured graph dispatches; "" if both agree."""
    wanted, found = sum(model.calls.values(), Counter()), sum(graph.calls.values(), Counter())
    lost = {call for call in wanted - found if any(dtype.is_floating_point for _, dtype in call[1])}
    added = set(found - wanted)
    if not lost and not added:
        return ""
    told = []
    for name in dict.fromkeys((*model.calls, *graph.calls)):
        own, other = (item.calls.get(name, Counter()) for item in (model, graph))
        missing = _names(call for call in own - other if call in lost)
        more = _names(call for call in other - own if call in added)
        if missing or more:
            told.append(f"{name or 'the model itself'!r} ({missing or 'nothing'} became {more or 'nothing'})")
    more_modules = f" and {len(told) - _TOLD_MODULES} more modules" if len(told) > _TOLD_MODULES else ""
    return (
        f"The captured graph computes what the model computes, by other operators in {', '.join(told[:_TOLD_MODULES])}"
        f"{more_modules}: while it was traced, the model took a branch that training does not take. Times and memory "
        "are predicted for the graph, which is also what runs."
    )


def _names(calls: Any) -> str:
    names = list(dict.fromkeys(name for name, _ in calls))
    rest = f" and {len(names) - _TOLD_OPERATORS} more" if len(names) > _TOLD_OPERATORS else ""
    return ", ".join(names[:_TOLD_OPERATORS]) + rest


# Relative error allowed between two orders of summation, by the coarsest dtype that takes part: some 1e4 roundings.
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}
# Samples of each of the two steps.
_STEPS = (2, 3)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What one step computes: outputs, gradients by parameter, buffers by name."""

    outputs: tuple[torch.Tensor, ...]
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def can_verify(model: nn.Module, inputs: Any, targets: Any) -> bool:
    """Return whether weights, buffers and batch hold data (none is fake or on "meta"), so that the model can run."""
    batch = [leaf for leaf in pytree.tree_leaves(split_batch(inputs, targets)) if isinstance(leaf, torch.Tensor)]
    return all(holds_data(tensor) for tensor in (*model.parameters(), *model.buffers(), *batch))


# Loss, gradients and buffers of two consecutive steps are compared. The two steps have different batch sizes where the
# graph allows it, so a baked-in size shows as well as a lost state. The model is left as it was: gradients are not
# accumulated into it, and buffers, Python attributes, training flags and random state are restored.
def verify_capture(
    captured: Captured, model: nn.Module, inputs: Any, targets: Any, loss: Callable[..., Any] | None
) -> str:
    """Run two steps of the captured graph and of the model, and compare outputs, gradients and buffers.

    Returns a sentence on operators that differ (`explain_calls`); "" if they agree, or if the graph has branches
    (`torch.cond`). Raises CaptureError if the results differ.
    """
    trace = captured.trace
    example = trace.layout.flatten(inputs, targets)
    sizes = (trace.batch_size,) * 2 if trace.fixed else _STEPS
    batches = [
        tuple(_resize(t, size) if grows else t for t, grows in zip(example, trace.batched, strict=True))
        for size in sizes
    ]
    parameters = {
        name: tensor
        for name, tensor in trace.state.items()
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad
    }

    def eager(tensors: tuple[torch.Tensor, ...], _size: int) -> Any:
        args, kwargs, rest = trace.layout.rebuild(tensors)
        with of_model.counting(model) if counted else nullcontext():
            output = model(*args, **kwargs)
            if loss is not None:
                return loss(output, *rest)
            return own_loss(output) if trace.has_loss else output

    def cut(tensors: tuple[torch.Tensor, ...], size: int) -> Any:
        made = part(captured, graph.inputs, graph.outputs, batch_size=size, ops=range(len(graph.ops)), device=device)
        made = made.to(device)
        return of_graph.run(made, modules, tensors) if counted else made(*tensors)

    graph, of_model, of_graph = captured.graph, Dispatched(), Dispatched()
    modules = {op.name: op.module for op in graph.ops}
    # torch.cond compiles its branches, which can fail while a mode intercepts what is dispatched.
    counted = not trace.branches
    device = next((tensor.device for tensor in (*trace.state.values(), *example)), CPU)

    with _unchanged(model, trace.training):
        expected = _run(eager, batches, sizes, parameters, model, trace.training)
    with _unchanged(model, trace.training):
        found = _run(cut, batches, sizes, parameters, model, trace.training)
    for step, (one, two) in enumerate(zip(expected, found, strict=True)):
        _compare(one, two, step, captured.graph.name)
    return explain_calls(of_model, of_graph)


def _run(
    call: Callable[[tuple[torch.Tensor, ...], int], Any],
    batches: list[tuple[torch.Tensor, ...]],
    sizes: tuple[int, ...],
    parameters: dict[str, nn.Parameter],
    model: nn.Module,
    training: bool,
) -> list[_Outcome]:
    # Seeded, so that dropout draws the same numbers in both arms.
    torch.manual_seed(0)
    outcomes = []
    for batch, size in zip(batches, sizes, strict=True):
        with torch.set_grad_enabled(training):
            # Clones, because forward may write to its inputs.
            leaves = pytree.tree_leaves(call(tuple(tensor.clone() for tensor in batch), size))
        outputs = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        gradients: dict[str, torch.Tensor] = {}
        if training and parameters and outputs[0].requires_grad:
            found = torch.autograd.grad(outputs[0], list(parameters.values()), allow_unused=True)
            optional: tuple[torch.Tensor | None, ...] = found
            gradients = {name: g for name, g in zip(parameters, optional, strict=True) if g is not None}
        buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        outcomes.append(_Outcome(tuple(leaf.detach() for leaf in outputs), gradients, buffers))
    return outcomes


@contextmanager
def _unchanged(model: nn.Module, training: bool) -> Iterator[None]:
    """Undo everything that running the model changes."""
    watch = StateWatch(model)
    with kept_buffers(model), training_flags(model, training), quiet_torch():
        try:
            yield
        finally:
            watch.restore()


def _resize(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """The first ``size`` samples, repeated if there are fewer."""
    return tensor[torch.arange(size, device=tensor.device) % tensor.shape[0]]


def _compare(expected: _Outcome, found: _Outcome, step: int, name: str) -> None:
    pairs = [
        (f"output {i}", one, two) for i, (one, two) in enumerate(zip(expected.outputs, found.outputs, strict=True))
    ]
    for what, one, two in (
        ("gradient", expected.gradients, found.gradients),
        ("buffer", expected.buffers, found.buffers),
    ):
        missing = sorted(one.keys() ^ two.keys())
        if missing:
            raise _mismatch(name, f"the {what} of {missing[0]!r} exists in only one of them", step)
        pairs += [(f"{what} of {key!r}", one[key], two[key]) for key in one]
    for what, tensor, other in pairs:
        if not _close(tensor, other):
            raise _mismatch(name, f"the {what} differs", step)


def _mismatch(name: str, what: str, step: int) -> CaptureError:
    return CaptureError(
        f"{name}: the captured model does not compute what the model computes: in step {step + 1}, {what}. Forward "
        "probably depends on something that is neither input, parameter nor buffer (a global, a counter, unseeded "
        "randomness); make that a buffer or an input."
    )


def _close(one: torch.Tensor, two: torch.Tensor) -> bool:
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    if not one.dtype.is_floating_point:
        return torch.equal(one, two)
    tolerance = _TOLERANCE.get(one.dtype, 5e-2)
    scale = max(float(one.double().norm()), 1e-6)
    difference = float((one.double() - two.double()).norm())
    return difference <= tolerance * scale or (torch.equal(one.isfinite(), two.isfinite()) and not one.isfinite().all())


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A captured model: its graph, and the data from which `part` and `differentiate` make modules and graphs.

    The object cannot be serialised; its ``graph`` can. Parameters and buffers are the model's own objects. ``trace``,
    ``table`` and ``legality`` are internal. ``remark``: a note for the user, such as operators that differ from those
    of the model; usually "".
    """

    graph: Graph
    trace: FlatTrace
    table: CaptureTable
    legality: Legality
    remark: str = ""


def capture_model(
    model: nn.Module,
    inputs: Any,
    *,
    targets: Any = (),
    loss: Callable[..., torch.Tensor] | None = None,
    name: str = "",
    mode: Literal["training", "inference"] = "training",
    verify: bool = True,
    needs_loss: bool = True,
    autocast: torch.dtype | None = None,
    events: EventSink | None = None,
) -> Captured:
    """Capture ``model`` as a graph that can be planned, estimated, cut into stages and run.

    Args:
        model: any module that torch.export can trace; its weights may be fake or on device "meta", so that no memory is
            needed.
        inputs: example batch: a tensor, a tuple of positional arguments or a dict of keyword arguments. Dim 0 of the
            tensors is the batch.
        targets: a tensor or a tuple of further arguments of the loss.
        loss: a function ``loss(output, *targets)`` that returns a scalar; the graph includes it. None: the model
            computes its loss itself, as its only output (a scalar) or as ``loss`` of its outputs.
        name: the graph's name; by default the name of the model's class.
        mode: "training" captures the loss and records what autograd saves; "inference" captures the outputs only.
        verify: compare the captured model with the model on a small batch, if weights and batch hold data.
        needs_loss: True: raise CaptureError for a training graph without a loss. False: such a graph is returned.
        autocast: the dtype of torch.autocast under which the captured model will run; the model is traced under the
            same autocast. None: no autocast.
        events: receives progress events.

    Returns:
        The captured model. Its graph holds for every batch size, or only for its ``batch_size`` if the sizes in the
        model do not follow the batch.

    Raises:
        CaptureError: the graph would not compute the same as the model; the message names the module or the source
            line.
    """
    events = events or NullSink()
    training = mode == "training"
    if not training:
        loss, targets = None, ()
    title = name or type(model).__name__
    if training:
        refuse_frozen(model, title)
    under = partial(_autocasting, model, autocast)
    trace_once = partial(
        trace_model, model, inputs, targets, loss, training=training, takes_own_loss=needs_loss and training
    )
    with quiet_torch():
        trace, described = _capture(model, trace_once, under, title, events)
    if training and needs_loss and not described.graph.has_loss:
        raise CaptureError(
            f"{title} returns no scalar and no loss was given, so there is nothing to train on. Pass loss=..., a "
            "function of the model's output and the targets; let the model return outputs with a scalar `loss`, as "
            'those of transformers do for a batch with labels; or capture with mode="inference".'
        )
    captured = Captured(
        graph=described.graph,
        trace=trace,
        table=described.table,
        legality=described.legality,
        remark=explain_checkpoint(trace.checkpoint) if training else "",
    )
    if verify:
        events.progress("verify", 0, 1)
        captured = check_capture(captured, model, inputs, targets=targets, loss=loss, autocast=autocast)
        events.progress("verify", 1, 1)
    return captured


def check_capture(
    captured: Captured,
    model: nn.Module,
    inputs: Any,
    *,
    targets: Any = (),
    loss: Callable[..., torch.Tensor] | None = None,
    autocast: torch.dtype | None = None,
) -> Captured:
    """Compare a captured model with the model, as `capture_model` does with ``verify``; return it with its remark.

    If weights or batch hold no data, ``captured`` is returned unchecked. Raises CaptureError if the two differ.
    """
    if not can_verify(model, inputs, targets):
        return captured
    with _autocasting(model, autocast):
        different = verify_capture(captured, model, inputs, targets, loss)
    return replace(captured, remark=f"{captured.remark} {different}".strip())


def flatten_batch(captured: Captured, inputs: Any, targets: Any = ()) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a batch in the order of ``captured.graph.inputs``.

    Raises CaptureError if the batch has another structure than the example batch of the capture.
    """
    return captured.trace.layout.flatten(inputs, targets)


def _autocasting(model: nn.Module, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Torch's autocast where the model's weights are; off for no type."""
    held = next(chain(model.parameters(), model.buffers()), None)
    kind = held.device.type if held is not None and held.device.type != "meta" else "cpu"
    # A cast weight that was kept would be one of the trace.
    return torch.autocast(kind, dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=False)


def _capture(
    model: nn.Module,
    trace_once: Callable[..., FlatTrace],
    under: Callable[[], AbstractContextManager[Any]],
    title: str,
    events: EventSink,
) -> tuple[FlatTrace, GraphWithTable]:
    units = find_units(model)
    # A module that says so takes batches of one size only, and refuses another.
    for symbolic in (False,) if getattr(model, "takes_one_size", False) else (True, False):
        events.progress("trace", 0, 1)
        with under():
            trace = trace_once(symbolic=symbolic)
        events.progress("trace", 1, 1)
        try:
            with under():
                return trace, describe_trace(trace, title, units)
        except NotAffineError:
            # The model's sizes do not follow the batch: describe it for this batch size only.
            continue
    raise CaptureError(
        f"{title}: the sizes of the graph contradict each other at one batch size; this is a defect of Meshwright, "
        "please report it."
    )
