"""Capture checks itself: the captured graph against the model, loss, gradients and buffers, two consecutive steps.

The two steps have different batch sizes where the graph allows any, so a baked size shows as well as a lost state. The
model keeps no trace: gradients are not accumulated into it, and buffers, Python attributes, training flags and random
state are restored.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from meshwright.capture.devices import CPU
from meshwright.capture.dispatched import Dispatched, explain_calls
from meshwright.capture.inputs import split_batch
from meshwright.capture.parts import part
from meshwright.capture.refusals import StateWatch
from meshwright.capture.surroundings import holds_data, kept_buffers, quiet_torch, training_flags
from meshwright.spec import CaptureError
from meshwright.spec.own_code import own_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from meshwright.capture.captured import Captured

# Relative error allowed between two orders of summation, by the coarsest dtype that takes part: some 1e4 roundings.
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}
# Samples of the two steps.
_STEPS = (2, 3)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What one step computes: outputs, gradients by parameter, buffers by name."""

    outputs: tuple[torch.Tensor, ...]
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def can_verify(model: nn.Module, inputs: Any, targets: Any) -> bool:
    """Whether weights and batch hold data."""
    batch = [leaf for leaf in pytree.tree_leaves(split_batch(inputs, targets)) if isinstance(leaf, torch.Tensor)]
    return all(holds_data(tensor) for tensor in (*model.parameters(), *model.buffers(), *batch))


def verify_capture(
    captured: Captured, model: nn.Module, inputs: Any, targets: Any, loss: Callable[..., Any] | None
) -> str:
    """How the operators of the graph differ from those that the model calls; empty if not, or if there are branches.

    Raises CaptureError unless two steps of the captured graph equal two steps of the model.
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
