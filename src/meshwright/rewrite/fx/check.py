"""Check a rewritten graph: compare outputs, gradients and written buffers with those of its original."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from meshwright.spec import RewriteError

if TYPE_CHECKING:
    from collections.abc import Sequence

_LOW = (torch.float32, torch.float16, torch.bfloat16)
# Relative to the largest number of a tensor: many roundings of 1e-16 each.
TOLERANCE = 1e-8
OWN_TOLERANCE, LOW_TOLERANCE = 1e-3, 5e-2


def check_equal(
    before: fx.GraphModule, after: fx.GraphModule, tensors: Sequence[torch.Tensor], *, training: bool
) -> float:
    """Compare outputs, written buffers and (in training) gradients in float64; return the largest relative difference.

    A difference is relative to the tensor's largest absolute value. Both graphs run on copies, with the same random
    numbers. Raises RewriteError if a tensor differs by more than `TOLERANCE`, or if its NaN and infinity are in
    different positions.
    """
    one, two = (_run(_as_double(graph), tensors, training=training, double=True) for graph in (before, after))
    return _compare(one, two, TOLERANCE)


def check_close(
    before: fx.GraphModule, after: fx.GraphModule, tensors: Sequence[torch.Tensor], *, training: bool = False
) -> float:
    """Compare two graphs like `check_equal`, but in their own dtypes; return the largest relative difference.

    Raises RewriteError for a difference above `OWN_TOLERANCE` (16-bit tensors: `LOW_TOLERANCE`).
    """
    one, two = (_run(copy.deepcopy(graph), tensors, training=training) for graph in (before, after))
    return _compare(one, two, OWN_TOLERANCE)


def _compare(one: dict[str, torch.Tensor | None], two: dict[str, torch.Tensor | None], tolerance: float) -> float:
    worst = 0.0
    for name, value in one.items():
        if name not in two:
            # A parameter that is no longer read has no gradient; in the original, its gradient must be missing or 0.
            if value is not None and bool((value != 0).any()):
                raise RewriteError(
                    f"The original graph has a non-zero {name}, but the rewritten graph has none; please report this "
                    "defect."
                )
            continue
        worst = max(worst, _difference(name, value, two[name], tolerance))
    return worst


def _difference(name: str, value: torch.Tensor | None, other: torch.Tensor | None, tolerance: float) -> float:
    if value is None or other is None:
        left = value if other is None else other
        if left is not None and bool((left != 0).any()):
            raise RewriteError(
                f"Only one of the original and the rewritten graph has a non-zero {name}; please report this defect."
            )
        return 0.0
    if value.shape != other.shape or not value.numel():
        if value.shape != other.shape:
            raise RewriteError(
                f"{name} has the shape {tuple(value.shape)} before and {tuple(other.shape)} after rewriting; please "
                "report this defect."
            )
        return 0.0
    if not value.is_floating_point():
        difference = float((value != other).any())
    else:
        finite = torch.isfinite(value)
        if not torch.equal(finite, torch.isfinite(other)):
            raise RewriteError(
                f"After rewriting, {name} has NaN or infinity at other positions than before; please report this "
                "defect."
            )
        kept, changed = value[finite], other[finite]
        scale = float(kept.abs().max()) if kept.numel() else 1.0
        difference = float((kept - changed).abs().max()) / max(scale, 1e-30) if kept.numel() else 0.0
    if value.dtype in (torch.float16, torch.bfloat16):
        tolerance = max(tolerance, LOW_TOLERANCE)
    if difference > tolerance:
        raise RewriteError(
            f"{name} differs by {difference:.1e} (relative) after rewriting; expected at most {tolerance:.0e}. "
            "The model stays as it was; please report this defect."
        )
    return difference


def _run(
    graph: fx.GraphModule, tensors: Sequence[torch.Tensor], *, training: bool, double: bool = False
) -> dict[str, torch.Tensor | None]:
    if training:
        try:
            return _run_once(graph, tensors, training=True, through=True, double=double)
        except RuntimeError:
            # The gradient of a batch that is written to after it was read cannot be computed.
            return _run_once(graph, tensors, training=True, through=False, double=double)
    return _run_once(graph, tensors, training=False, through=False, double=double)


def _run_once(
    graph: fx.GraphModule, tensors: Sequence[torch.Tensor], *, training: bool, through: bool, double: bool
) -> dict[str, torch.Tensor | None]:
    """``through``: gradients of the batch are wanted, too."""
    given = [tensor.detach().clone() for tensor in tensors]
    if double:
        given = [tensor.double() if tensor.dtype in _LOW else tensor for tensor in given]
    # Views of leaves, so that writes into the batch are followed, too.
    if through:
        given = [tensor.requires_grad_() if tensor.is_floating_point() else tensor for tensor in given]
    before = {name: value.clone() for name, value in graph.named_buffers()}
    usual = torch.get_default_dtype()
    with torch.random.fork_rng(), torch.set_grad_enabled(training):
        torch.manual_seed(0)
        # Whole numbers times a float have the default dtype.
        torch.set_default_dtype(torch.float64 if double else usual)
        try:
            results = graph(*[tensor.clone() for tensor in given])
        finally:
            torch.set_default_dtype(usual)
    found: dict[str, torch.Tensor | None] = {f"output {i}": value.detach() for i, value in enumerate(results)}
    # Only written buffers; a buffer that is only read may be missing from the other graph.
    for name, value in graph.named_buffers():
        if not torch.equal(value, before[name]):
            found[f"buffer {name}"] = value
    if training:
        wanted = [value for value in results if isinstance(value, torch.Tensor) and value.requires_grad]
        named: dict[str, torch.Tensor] = {
            f"gradient of {name}": value for name, value in graph.named_parameters() if value.requires_grad
        }
        named |= {f"gradient of input {i}": value for i, value in enumerate(given) if value.requires_grad}
        if wanted:
            generator = torch.Generator().manual_seed(1)
            seeds = [torch.randn(value.shape, generator=generator, dtype=value.dtype) for value in wanted]
            grads = torch.autograd.grad(wanted, list(named.values()), seeds, allow_unused=True)
            found |= dict(zip(named, grads, strict=True))
    return found


def _as_double(graph: fx.GraphModule) -> fx.GraphModule:
    made = copy.deepcopy(graph).double()
    for node in made.graph.nodes:
        if node.op == "call_function":
            node.args = fx.node.map_aggregate(node.args, _double)
            node.kwargs = fx.node.map_aggregate(node.kwargs, _double)
    made.recompile()
    return made


def _double(argument: Any) -> Any:
    return torch.float64 if isinstance(argument, torch.dtype) and argument in _LOW else argument
