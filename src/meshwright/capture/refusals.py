"""Find code that cannot be captured faithfully, and raise CaptureError with the module or source line.

torch.export silently drops backward methods of custom `autograd.Function`s, hooks that forward registers on tensors,
backward hooks of modules, and changes of Python attributes. At control flow that depends on data it stops with long
stack traces. Here each case becomes an error message of one paragraph.
"""

from __future__ import annotations

import sys
import traceback
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils import checkpoint as checkpointing

from meshwright.spec import CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterator

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_MODULE_FACTS = frozenset(vars(nn.Module()))


def refuse_backward_hooks(model: nn.Module) -> None:
    """Raise CaptureError if a module has backward hooks, which export would drop."""
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"Module {name or type(model).__name__!r} ({type(module).__name__}) has backward hooks, which a "
                "captured model would drop, so its gradients could differ. Remove the hooks before capturing, or put "
                "hooks on its parameters, which are kept."
            )


def refuse_frozen(model: nn.Module, title: str) -> None:
    """Raise CaptureError if the model has parameters and all of them are frozen; ``title`` names the model."""
    parameters = list(model.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        raise CaptureError(
            f"{title}: no parameter requires a gradient, so there is nothing to train. Call requires_grad_(True) on "
            "the parts that are trained; the forward pass alone is captured by `meshwright capture --inference`, in "
            'Python with mode="inference".'
        )


@contextmanager
def refuse_custom_gradients(model: nn.Module) -> Iterator[None]:
    """Make calls of custom autograd.Functions and of Tensor.register_hook raise CaptureError until the context ends.

    Only calls from the model's code are refused, not those from torch itself.
    """
    original = vars(torch.autograd.Function)["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is checkpointing.CheckpointFunction:
            raise CaptureError(
                f"{_caller(model)} uses torch.utils.checkpoint with use_reentrant=True, whose gradients a captured "
                "model would lose. Pass use_reentrant=False; Meshwright's plans decide about recomputation themselves."
            )
        if not cls.__module__.startswith("torch."):
            raise CaptureError(
                f"{_caller(model)} calls the custom autograd.Function {cls.__name__!r}; a captured model would drop "
                "its backward method and compute other gradients. Register it as an operator with "
                "torch.library.custom_op and register_autograd."
            )
        return original.__get__(None, cls)(*args, **kwargs)

    def refuse_hook(name: str) -> Any:
        method = getattr(torch.Tensor, name)

        def register(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if _user_frame() is None:
                return method(tensor, *args, **kwargs)
            raise CaptureError(
                f"{_caller(model)} calls Tensor.{name} in forward; a captured model would drop the hook and compute "
                "other gradients. Register hooks on parameters instead, or compute what the hook does in forward."
            )

        return register

    with ExitStack() as stack:
        # The raw class attribute goes back in place afterwards; restoring the bound method would break later Functions.
        stack.enter_context(patch.object(torch.autograd.Function, "apply", classmethod(apply)))
        for name in ("register_hook", "register_post_accumulate_grad_hook"):
            stack.enter_context(patch.object(torch.Tensor, name, refuse_hook(name)))
        yield


@contextmanager
def note_data_access(model: nn.Module) -> Iterator[list[str]]:
    """Yield a list that receives each source line outside torch that uses ``Tensor.data`` until the context ends."""
    original: Any = torch._C.TensorBase.data
    places: list[str] = []

    def note() -> None:
        if _user_frame() is not None:
            places.append(_caller(model))

    def read(tensor: torch.Tensor) -> torch.Tensor:
        note()
        return original.__get__(tensor)

    def write(tensor: torch.Tensor, value: torch.Tensor) -> None:
        note()
        original.__set__(tensor, value)

    with patch.object(torch.Tensor, "data", property(read, write)):
        yield places


@contextmanager
def note_checkpoints(model: nn.Module) -> Iterator[list[str]]:
    """Yield a list that receives each source line that calls ``torch.utils.checkpoint`` until the context ends.

    A trace does not contain these calls.
    """
    # What keeps a call's inputs in place of what autograd would save, made once per call.
    hook: Any = checkpointing._checkpoint_hook
    begin, places = hook.__init__, list[str]()

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        places.append(_caller(model))
        begin(self, *args, **kwargs)

    with patch.object(hook, "__init__", noted):
        yield places


def explain_checkpoint(place: str) -> str:
    """Return a remark on ``place``, the source line that calls ``torch.utils.checkpoint``; "" if ``place`` is ""."""
    if not place:
        return ""
    return (
        f"{place} calls torch.utils.checkpoint, which the graph leaves out: the plan decides what is recomputed. "
        "Plan with --recompute full for the same, or with another --recompute that takes less time."
    )


def refuse_data_access(place: str) -> CaptureError:
    """Return the error for ``Tensor.data``, whose values export would store as a constant; ``place``: source line."""
    return CaptureError(
        f"{place} uses Tensor.data in forward, which hides the tensor from the trace, so its values would be kept as "
        "a constant. Use tensor.detach() instead, or the tensor itself if gradients may flow through it."
    )


def refuse_sparse_gradient(place: str) -> CaptureError:
    """Return the error for an embedding with ``sparse=True``, because gradients are exchanged as dense tensors."""
    return CaptureError(
        f"{place}: an embedding with sparse=True gives its weight a sparse gradient, which is neither planned nor "
        "exchanged between ranks. Pass sparse=False."
    )


class StateWatch:
    """Stores the Python attributes of every module of a model, to find and undo changes that forward makes."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = {name: self._attributes(module) for name, module in model.named_modules()}
        self._contents = [
            (value, value.copy())
            for held in self._before.values()
            for value in held.values()
            if isinstance(value, list | dict | set)
        ]
        self._prints = {name: _fingerprints(held) for name, held in self._before.items()}

    @staticmethod
    def _attributes(module: nn.Module) -> dict[str, Any]:
        return {key: value for key, value in vars(module).items() if key not in _MODULE_FACTS and key != "forward"}

    def changes(self) -> list[tuple[str, str]]:
        """Return (module path, attribute) of each Python attribute that has changed since the watch was made."""
        found = []
        for name, module in self._model.named_modules():
            if type(module).__module__.startswith("torch.nn."):
                # torch's own bookkeeping (an LSTM's references to its weights) changes no result.
                continue
            now = _fingerprints(self._attributes(module))
            before = self._prints.get(name, {})
            found += [(name, key) for key in {**before, **now} if before.get(key) != now.get(key)]
        return found

    def restore(self) -> None:
        """Restore all attributes, including the former contents of lists, dicts and sets."""
        for name, module in self._model.named_modules():
            before = self._before.get(name, {})
            for key in self._attributes(module).keys() - before.keys():
                del vars(module)[key]
            vars(module).update(before)
        for value, content in self._contents:
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)

    def refuse(self, changes: list[tuple[str, str]]) -> None:
        """Raise CaptureError for the first of ``changes`` (the result of `changes`), if there are any."""
        if changes:
            name, key = changes[0]
            module = dict(self._model.named_modules()).get(name, self._model)
            raise CaptureError(
                f"Forward changes the Python attribute {key!r} of module {name or 'the model itself'!r} "
                f"({type(module).__name__}); a captured model would keep the value of the first call. Make it a buffer "
                "(register_buffer), or compute it in __init__."
            )


def is_data_dependent(error: BaseException) -> bool:
    """Return whether torch raised ``error`` because a branch or a size depends on the data of a tensor."""
    kinds = ("DataDependent", "DynamicOutputShape")
    text = str(error).lower()
    return type(error).__name__.startswith(("GuardOn", *kinds)) or "data-dependent" in text or "unbacked" in text


def refuse_data_dependence(place: str) -> CaptureError:
    """Return the error for control flow, sizes or numbers that depend on data; ``place``: source line or module."""
    remedy = (
        "Use torch.cond for branches on data, torch.where or masks for sizes, tensors instead of numbers, or move the "
        "decision out of the model."
    )
    if "site-packages" in place:
        remedy = "The line is a library's: look for a setting of the model that avoids it, or write this part yourself."
    return CaptureError(
        f"{place}: control flow, a size or a Python number depends on the data of a tensor, so one graph cannot "
        f"describe the model. {remedy}"
    )


def explain_failure(error: BaseException, model: nn.Module) -> CaptureError:
    """Return a CaptureError for an exception that torch.export raised, with the model's source line."""
    place = _place_of(error) or type(model).__name__
    kind, text = type(error).__name__, str(error)
    if is_data_dependent(error):
        return refuse_data_dependence(place)
    reason = next((line.strip() for line in text.splitlines() if line.strip()), "no message")
    return CaptureError(
        f"{place}: the model cannot be exported ({kind}: {reason}). The model must be traceable by torch.export; "
        "change this line, or capture the parts of the model that can be traced."
    )


def user_place(stack_trace: str) -> str:
    """Return ``file:line`` of the innermost line outside torch in a stack trace's text; "" if there is no such line."""
    lines = [line.strip() for line in stack_trace.splitlines()]
    for line in reversed(lines):
        if line.startswith('File "') and '", line ' in line:
            file, _, rest = line[6:].partition('", line ')
            if not _is_library(file):
                return f"{file}:{rest.split(',')[0]}"
    return ""


def _place_of(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_library(frame.filename)]
    if frames:
        return f"{frames[-1].filename}:{frames[-1].lineno}"
    for linked in (error.__cause__, error.__context__):
        if linked is not None and (place := _place_of(linked)):
            return place
    return ""


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or file.startswith(("torch/", "<")) or "/contextlib.py" in file


def _user_frame() -> FrameType | None:
    """The innermost frame outside torch, unless torch called torch (hooks that torch registers itself)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES[1]):
        frame = frame.f_back
    return None if frame is None or _is_library(frame.f_code.co_filename) else frame


def _caller(model: nn.Module) -> str:
    """The user's line that is being run, with the module that runs it."""
    names = {id(module): name for name, module in model.named_modules()}
    frame: FrameType | None = sys._getframe(1)
    place = owner = ""
    while frame is not None and not owner:
        if not _is_library(frame.f_code.co_filename):
            place = place or f"{frame.f_code.co_filename}:{frame.f_lineno}"
            held = frame.f_locals.get("self")
            if isinstance(held, nn.Module):
                named = names.get(id(held), getattr(held, "_name", ""))
                owner = f"module {named!r} ({type(held).__name__})" if named else f"a {type(held).__name__}"
        frame = frame.f_back
    return f"{place or 'the model'}: {owner or 'the model'}"


def _fingerprints(attributes: dict[str, Any]) -> dict[str, Any]:
    return {key: _fingerprint(value, 3) for key, value in attributes.items()}


def _fingerprint(value: Any, depth: int) -> Any:
    """Plain values by value, plain containers by content, everything else by identity (the watch keeps it alive)."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return type(value).__name__, value
    if depth and isinstance(value, list | tuple | set | frozenset):
        return type(value).__name__, [_fingerprint(item, depth - 1) for item in value]
    if depth and isinstance(value, dict):
        return type(value).__name__, [(key, _fingerprint(item, depth - 1)) for key, item in value.items()]
    return id(value)
