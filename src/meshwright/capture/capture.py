"""nn.Module + example batch → `Captured`: the package's entry."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch

from meshwright.capture.captured import Captured
from meshwright.capture.describe import GraphWithTable, NotAffineError, describe_trace
from meshwright.capture.export import trace_model
from meshwright.capture.refusals import explain_checkpoint, refuse_frozen
from meshwright.capture.surroundings import quiet_torch
from meshwright.capture.units import find_units
from meshwright.capture.verify import can_verify, verify_capture
from meshwright.spec import CaptureError, EventSink, NullSink

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import nn

    from meshwright.capture.trace import FlatTrace


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
        model: any module that torch.export can trace; its weights may be on device "meta" or fake, then nothing is
            allocated.
        inputs: example batch: a tensor, a tuple of positional arguments or a dict of keyword arguments. The batch is
            dim 0.
        targets: a tensor or a tuple, passed to the loss behind the output.
        loss: ``loss(output, *targets)`` → scalar, computed by the captured graph. None: a model that returns one
            scalar, or outputs with a ``loss``, computes it.
        name: the graph's name; the model's class by default.
        mode: "training" records what autograd needs; "inference" captures outputs only (a loss is not computed).
        verify: compare the captured model with the model itself on a small batch, where there are weights.
        needs_loss: a training graph without loss is refused; False captures the forward part of training alone.
        autocast: the type of torch's autocast that the captured model will run under; it is traced so, and a model that
            asks a tensor for its type is answered as there.
        events: receives progress.

    Returns:
        The captured model; its graph is symbolic in the batch size, or has ``batch_size`` set if the model bakes it in.

    Raises:
        CaptureError: the model cannot be captured faithfully; the message names the module or the source line.
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
    """What `capture_model` captured without ``verify``, verified now; as it is where there are no weights.

    Raises CaptureError if the captured model and the model differ.
    """
    if not can_verify(model, inputs, targets):
        return captured
    with _autocasting(model, autocast):
        different = verify_capture(captured, model, inputs, targets, loss)
    return replace(captured, remark=f"{captured.remark} {different}".strip())


def flatten_batch(captured: Captured, inputs: Any, targets: Any = ()) -> tuple[torch.Tensor, ...]:
    """The batch's tensors in the order of ``captured.graph.inputs``.

    Raises CaptureError if the batch is built unlike the captured example.
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
        f"{title}: the sizes of the graph contradict each other at one batch size; this is a defect in Meshwright."
    )
