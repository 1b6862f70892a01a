"""Ops of a local graph whose shards need another computation than torch's operator.

embedding       a process has some rows of the table: the others' are zero, and the sum over all is the result
cross_entropy   a process has some classes: the largest logit, the sum of exponentials and the target's own logit are
                exchanged, a number per target each (Shoeybi et al., Megatron-LM, 2019, section 3)
attention       a process has some of the queries, after those of the processes before it, and all keys; under a causal
                mask it uses the keys up to its last query
arange          a process continues the numbers of those before it
dropout         all processes draw the whole mask, as one process would, and use their shard
products        of which each process has a part of the sum: one of them adds the bias
means           every process has a part of the sum over the number of all, for cross entropy of the targets that count
sums            of parts and of whole tensors: each process adds its share of the latter, whose gradient is whole
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from meshwright.runtime.teams.grid import AxisGroup
from meshwright.spec.errors import PlanError
from meshwright.spec.graph import Op


class LookUp(torch.nn.Module):
    """Embedding by the rows that this process has."""

    def __init__(self, op: Op, axis: AxisGroup) -> None:
        super().__init__()
        self._padding = int(dict(op.attributes).get("padding_idx", "-1"))
        self._axis = axis

    def forward(self, weight: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """The rows; zero for those of other processes."""
        local = index - self._axis.index * len(weight)
        mine = (local >= 0) & (local < len(weight))
        padding = self._padding - self._axis.index * len(weight)
        own_padding = padding if self._padding >= 0 and 0 <= padding < len(weight) else None
        return F.embedding(local * mine, weight, padding_idx=own_padding) * mine.unsqueeze(-1)


class CrossEntropy(torch.nn.Module):
    """Cross entropy of logits whose classes, dim 1, are sharded; their ``rows`` may be, too, over other axes."""

    def __init__(self, op: Op, axis: AxisGroup, rows: Sequence[AxisGroup]) -> None:
        super().__init__()
        attributes = dict(op.attributes)
        # As in torch: 1 is the mean, 2 the sum.
        self._is_mean = attributes.get("reduction", "1") == "1"
        self._ignored = int(attributes.get("ignore_index", "-100"))
        self._axis, self._rows = axis, tuple(rows)
        if attributes.get("reduction", "1") not in ("1", "2") or float(attributes.get("label_smoothing", "0")):
            raise refuse_share(op, "smooths labels or keeps the loss of every target")
        if len(op.inputs) > 2:
            raise refuse_share(op, "weighs classes")

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss, the same on every process."""
        # As under autocast, sums of exponentials are never in half precision.
        exact = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
        rows = exact.movedim(1, -1).flatten(0, -2)
        found: torch.Tensor = _CrossEntropy.apply(
            rows, target.flatten(), self._ignored, self._is_mean, self._axis, self._rows
        )
        return found


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        ignored: int,
        is_mean: bool,
        axis: AxisGroup,
        others: Sequence[AxisGroup],
    ) -> torch.Tensor:
        largest = logits.max(-1).values
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=axis.group)
        shares = (logits - largest.unsqueeze(-1)).exp()
        total = shares.sum(-1)
        dist.all_reduce(total, group=axis.group)
        local = target - axis.index * logits.shape[-1]
        mine = (local >= 0) & (local < logits.shape[-1])
        own = logits.gather(-1, (local * mine).unsqueeze(-1)).squeeze(-1) * mine
        dist.all_reduce(own, group=axis.group)
        counts = target != ignored
        number = counts.sum() if is_mean else torch.ones((), device=logits.device)
        for other in others if is_mean else ():
            dist.all_reduce(number, group=other.group)
        ctx.save_for_backward(shares, total, local, mine, counts, number)
        losses = total.log() + largest - own
        return (losses * counts).sum() / number

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        shares, total, local, mine, counts, number = ctx.saved_tensors
        made = shares / total.unsqueeze(-1)
        made.scatter_add_(-1, (local * mine).unsqueeze(-1), -mine.to(made.dtype).unsqueeze(-1))
        return made * (gradient * counts / number).unsqueeze(-1), None, None, None, None, None


class Attend(torch.nn.Module):
    """Attention of some queries to all keys, or under a causal mask to those up to the last query."""

    def __init__(self, op: Op, axis: AxisGroup, call: torch.nn.Module) -> None:
        super().__init__()
        attributes = dict(op.attributes)
        self._is_causal = attributes.get("is_causal") == "True"
        self._axis, self._call = axis, call
        scale = attributes.get("scale")
        self._scale = float(scale) if scale not in (None, "None") else None
        self._is_grouped = attributes.get("enable_gqa") == "True"

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        """Attend with queries that see all keys before them in the whole row."""
        if not self._is_causal:
            found: torch.Tensor = self._call(*given)
            return found
        query, key, value = given
        queries, before = query.shape[-2], self._axis.index * query.shape[-2]
        # No query of this process sees a key after its last one.
        key, value = (tensor[..., : before + queries, :] for tensor in (key, value))
        seen = torch.ones(queries, key.shape[-2], dtype=torch.bool, device=query.device).tril(before)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=self._scale, enable_gqa=self._is_grouped
        )


class CountOn(torch.nn.Module):
    """The own shard of a range."""

    def __init__(self, axis: AxisGroup, call: torch.nn.Module) -> None:
        super().__init__()
        self._axis, self._call = axis, call

    def forward(self) -> torch.Tensor:
        """The own numbers."""
        found: torch.Tensor = self._call()
        return found + self._axis.index * len(found)


class DropOut(torch.nn.Module):
    """Dropout by the own shard of the whole mask; ``share`` takes it."""

    def __init__(self, op: Op, whole: tuple[int, ...], share: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._kept, self._whole, self._share = 1.0 - float(dict(op.attributes)["p"]), whole, share

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Drop the elements that the whole mask drops."""
        mask = torch.empty(self._whole, dtype=value.dtype, device=value.device).bernoulli_(self._kept)
        return value * self._share(mask.div_(self._kept))


class AddOnce(torch.nn.Module):
    """A product whose parts are summed: the first process of the axis adds the bias, which is at ``place``."""

    def __init__(self, place: int, axis: AxisGroup, call: torch.nn.Module) -> None:
        super().__init__()
        self._place, self._is_first, self._call = place, axis.index == 0, call

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        """The own part of the sum."""
        inputs = list(given)
        inputs[self._place] = _Once.apply(inputs[self._place], self._is_first)
        found: torch.Tensor = self._call(*inputs)
        return found


class _Once(torch.autograd.Function):
    """The value on one process, zero on the others; its gradient is whole on all."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, is_here: bool) -> torch.Tensor:  # noqa: ARG004 - autograd's
        return value.clone() if is_here else torch.zeros_like(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ARG004
        return gradient, None


class AddShare(torch.nn.Module):
    """A sum of parts of a sum and of ``whole`` inputs: each process adds a share of these; their gradient is whole."""

    def __init__(self, whole: tuple[bool, ...], size: int, call: torch.nn.Module) -> None:
        super().__init__()
        self._whole, self._size, self._call = whole, size, call

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        """The own part of the sum."""
        pairs = zip(given, self._whole, strict=True)
        found: torch.Tensor = self._call(*(_Divide.apply(x, self._size) if is_whole else x for x, is_whole in pairs))
        return found


class _Divide(torch.autograd.Function):
    """A share of a value, whose gradient is that of the whole."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, size: int) -> torch.Tensor:  # noqa: ARG004 - autograd's
        return value / size

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ARG004
        return gradient, None


class MeanShare(torch.nn.Module):
    """The own part of a mean of which every process has an equal number of terms."""

    def __init__(self, size: int, call: torch.nn.Module) -> None:
        super().__init__()
        self._size, self._call = size, call

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        """The sum of the own terms over the number of all."""
        found: torch.Tensor = self._call(*given)
        return found / self._size


class RowLoss(torch.nn.Module):
    """The own part of the mean cross entropy of some of the targets, over the count or weight of all."""

    def __init__(self, op: Op, rows: Sequence[AxisGroup]) -> None:
        super().__init__()
        attributes = dict(op.attributes)
        self._ignored = int(attributes.get("ignore_index", "-100"))
        self._smoothing = float(attributes.get("label_smoothing", "0"))
        self._rows = tuple(rows)

    def forward(self, logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """The own losses over the number of all targets that count."""
        if target.dtype.is_floating_point:
            total = torch.tensor(float(target.numel() // target.shape[1]), dtype=torch.float64, device=logits.device)
        else:
            counts = target != self._ignored
            shares = counts if weight is None else counts * weight[target * counts]
            total = shares.sum().double()
        for axis in self._rows:
            dist.all_reduce(total, group=axis.group)
        losses = F.cross_entropy(
            logits,
            target,
            weight,
            reduction="sum",
            ignore_index=self._ignored,
            label_smoothing=self._smoothing,
        )
        return losses / total.to(losses.dtype)


# The index of the bias among a product's arguments.
BIASES: Mapping[str, int] = {
    "linear": 2,
    "conv1d": 2,
    "conv2d": 2,
    "conv3d": 2,
    "conv_transpose2d": 2,
    "addmm": 0,
    "baddbmm": 0,
}


def refuse_share(op: Op, why: str) -> PlanError:
    """The error for an op that cannot be sharded, with the reason."""
    return PlanError(
        f"The plan splits {op.name!r}, which {why}; such an op cannot be sharded here. Place the op whole "
        f"(`--placement '{op.name}=tensor'`), or plan without the axis."
    )
