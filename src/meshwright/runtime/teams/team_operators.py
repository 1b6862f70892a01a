"""Ops of a local graph that need another computation on shards than torch's operator; collectives between them.

embedding       a process holds some rows of the table; rows of other processes give zero, and an all-reduce adds up
cross_entropy   a process holds some classes: the largest logit, the sum of exponentials and the target's own logit are
                all-reduced, one number per target each (Shoeybi et al., Megatron-LM, 2019, section 3)
attention       a process holds a range of the queries, and all keys; under a causal mask it uses the keys up to its
                last query
arange          a process computes its range of the numbers
dropout         all processes draw the whole mask, as one process would, and use their shard
products        each process has a partial sum; the first process of the axis adds the bias
means           each process divides its partial sum by the total count (for cross entropy: of the targets that are
                not ignored, or their weight)
sums            of partial and of whole tensors: each of n processes adds 1/n of the whole ones, whose gradient is whole
conversions     of a tensor from its layout to the wanted one, by a collective (`Convert`)
experts         routed tokens go to the ranks that have their experts, and back (`arranging_module`)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from meshwright.program.sharding import MESH
from meshwright.runtime.teams.grid import AxisGroup
from meshwright.runtime.teams.shares import Cut
from meshwright.spec import Op, PlanError
from meshwright.spec.exchange import CollectiveKind
from meshwright.torch_names import all_gather_single, reduce_scatter_single


# Routed tokens (`program.sharding.convert`):
#
#     received  (ranks, experts here): the number of rows from each rank for each expert
#     arrival   the index, among the arriving rows rank by rank, of the i-th row in the order of the experts
#     return    the inverse of that
#
# The number of rows is known only at run time: counts are exchanged first, and read by the host, as the all-to-all of
# the rows needs them. Gradients go in the other direction. No row is dropped.
def count_rows(ends: torch.Tensor) -> torch.Tensor:
    """Return the number of rows of each expert; ``ends`` are the ends of the experts' ranges of sorted rows."""
    return torch.diff(ends, prepend=ends.new_zeros(1)).long()


def expert_of_arrived(received: torch.Tensor) -> torch.Tensor:
    """Return the index of the local expert of each row, in order of arrival."""
    num_ranks, num_experts = received.shape
    experts = torch.arange(num_experts, device=received.device).repeat(num_ranks)
    return experts.repeat_interleave(received.flatten())


def arrival(received: torch.Tensor) -> torch.Tensor:
    """Return the permutation that sorts arrived rows by expert.

    ``received`` (ranks, local experts): the number of rows from each rank for each local expert.
    """
    return expert_of_arrived(received).argsort(stable=True)


def arrival_inverse(received: torch.Tensor) -> torch.Tensor:
    """Return the inverse permutation of `arrival`, which restores the order of arrival."""
    return arrival(received).argsort()


def group_ends(received: torch.Tensor) -> torch.Tensor:
    """Return the end (int32) of each local expert's range of rows, after rows are sorted by expert."""
    return received.sum(0).cumsum(0).int()


def group_ids(received: torch.Tensor) -> torch.Tensor:
    """Return the index of the local expert of each row, after rows are sorted by expert."""
    return expert_of_arrived(received).sort().values


ARRANGING: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    f"{MESH}arrival.default": arrival,
    f"{MESH}return.default": arrival_inverse,
    f"{MESH}group_ends.default": group_ends,
    f"{MESH}group_ids.default": group_ids,
}
COUNTING = f"{MESH}exchange_counts.default"
DISPATCH = f"{MESH}dispatch.default"
COMBINE = f"{MESH}combine.default"


def arranging_module(op: Op, axis: AxisGroup | None) -> torch.nn.Module | None:
    """Return the module for an op that routes tokens to experts and back; None for other ops."""
    if op.kind in ARRANGING:
        return Arrange(ARRANGING[op.kind])
    if axis is None or op.kind not in (COUNTING, DISPATCH, COMBINE):
        return None
    return ExchangeCounts(axis) if op.kind == COUNTING else ExchangeRows(axis, is_home=op.kind == COMBINE)


class Arrange(torch.nn.Module):
    """The module of an op that computes indices from the numbers of received rows (`ARRANGING`)."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, received: torch.Tensor) -> torch.Tensor:
        """Return the indices; ``received`` has shape (ranks, local experts)."""
        return self._function(received)


class ExchangeCounts(torch.nn.Module):
    """All-to-all of the numbers of rows that each rank sends to each expert."""

    def __init__(self, axis: AxisGroup) -> None:
        super().__init__()
        self._axis = axis

    def forward(self, ends: torch.Tensor) -> torch.Tensor:
        """Return the numbers of rows to receive, shape (ranks, local experts).

        ``ends``: the ends of all experts' ranges in this process's sorted rows.
        """
        sent = count_rows(ends)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._axis.group)
        return received.view(self._axis.size, -1)


class ExchangeRows(torch.nn.Module):
    """All-to-all of rows to the ranks that have their experts; with ``is_home``, back to the ranks they came from."""

    def __init__(self, axis: AxisGroup, *, is_home: bool) -> None:
        super().__init__()
        self._axis, self._is_home = axis, is_home

    def forward(self, rows: torch.Tensor, ends: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        """Return the arrived rows, in the order of the ranks that sent them.

        ``ends`` and ``received``: what `ExchangeCounts` got and returned, also on the way back (``is_home``).
        """
        sent = count_rows(ends).view(self._axis.size, -1).sum(1)
        out, back = torch.stack((sent, received.sum(1))).tolist()
        if self._is_home:
            out, back = back, out
        found: torch.Tensor = _ExchangeRows.apply(rows, out, back, self._axis)
        return found


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], axis: AxisGroup
    ) -> torch.Tensor:
        ctx.exchange = sent, received, axis
        return _send(rows, sent, received, axis)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        sent, received, axis = ctx.exchange
        return _send(gradient, received, sent, axis), None, None, None


def _send(rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], axis: AxisGroup) -> torch.Tensor:
    found = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), list(received), list(sent), group=axis.group)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalConversion:
    """One conversion of a tensor's layout over the processes of an axis.

    ``have`` and ``want``: the cuts before and after, None for full size. ``sums``: the input is a partial sum.
    ``backward``: the collective for the gradient, None without one. ``goes_round``: shards are passed round a ring.
    """

    axis: AxisGroup
    have: Cut | None
    want: Cut | None
    sums: bool
    backward: CollectiveKind | None
    goes_round: bool = False


# Conversions of the sharding (`program.sharding.convert`) over the processes of an axis. The forward converts a tensor
# from its layout to the wanted one; the backward converts its gradient in the other direction by the collective that
# the local graph lists for it, or by none if every process has what it needs:
#
#     reduce_scatter, send   gradients are summed, each process keeps its shard
#     all_reduce             they are summed
#     all_gather             the shards of the gradient are joined
#     all_to_all             they are sharded along the other dim
#     none                   the own shard of a gradient that is whole everywhere, or the gradient itself
class Convert(torch.nn.Module):
    """The module of a conversion."""

    def __init__(self, conversion: LocalConversion) -> None:
        super().__init__()
        self._conversion = conversion

    def forward(self, value: torch.Tensor, made: torch.Tensor | None = None) -> torch.Tensor:
        """Return the converted tensor. ``made``: the result if it is known already; then nothing is sent."""
        found: torch.Tensor = _Convert.apply(value, self._conversion, made)
        return found


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, conversion: LocalConversion, made: torch.Tensor | None) -> torch.Tensor:
        ctx.conversion = conversion
        if made is not None:
            return made.view_as(made)
        axis, have, want = conversion.axis, conversion.have, conversion.want
        if conversion.sums:
            return sum_shares(value, want, axis) if want is not None else sum_up(value, axis)
        if have is None:
            return want.shares(value, axis.size)[axis.index].contiguous() if want is not None else value.view_as(value)
        if want is not None:
            return swap(value, have, want, axis)
        return have.join(pass_round(value, axis) if conversion.goes_round else gather(value, axis))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        conversion: LocalConversion = ctx.conversion
        axis, have, want = conversion.axis, conversion.have, conversion.want
        match conversion.backward:
            case "reduce_scatter":
                assert have is not None
                made = sum_shares(gradient, have, axis)
            case "send":
                assert have is not None
                made = sum_round(have.shares(gradient, axis.size), axis)
            case "all_reduce":
                made = sum_up(gradient, axis)
            case "all_gather":
                assert want is not None
                made = want.join(gather(gradient, axis))
            case "all_to_all":
                assert want is not None
                made = swap(gradient, want, have, axis) if have is not None else want.join(gather(gradient, axis))
            case None:
                made = have.shares(gradient, axis.size)[axis.index] if have is not None else gradient
        return made, None, None


def gather(value: torch.Tensor, axis: AxisGroup) -> list[torch.Tensor]:
    """Return the tensors of all processes of the axis (all-gather)."""
    found = value.new_empty(axis.size * value.numel())
    all_gather_single(found, value.contiguous().view(-1), group=axis.group)
    return list(found.view(axis.size, *value.shape).unbind())


def sum_up(value: torch.Tensor, axis: AxisGroup) -> torch.Tensor:
    """Return the sum over the processes of the axis (all-reduce)."""
    found = value.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(found, group=axis.group)
    return found


def sum_shares(value: torch.Tensor, cut: Cut, axis: AxisGroup) -> torch.Tensor:
    """Return this process's shard of the sum over the processes of the axis (reduce-scatter)."""
    shares = torch.stack(cut.shares(value, axis.size))
    found = torch.empty_like(shares[0])
    reduce_scatter_single(found.view(-1), shares.view(-1), group=axis.group)
    return found


def swap(value: torch.Tensor, have: Cut, want: Cut, axis: AxisGroup) -> torch.Tensor:
    """Return this process's shard of the same tensor by another cut (all-to-all)."""
    if have.dim == want.dim:
        return want.shares(have.join(gather(value, axis)), axis.size)[axis.index].contiguous()
    shares = torch.stack(want.shares(value, axis.size))
    found = torch.empty_like(shares)
    dist.all_to_all_single(found.view(-1), shares.view(-1), group=axis.group)
    return have.join(found.unbind())


def pass_round(value: torch.Tensor, axis: AxisGroup) -> list[torch.Tensor]:
    """Return the tensors of all processes of the axis, which pass them on in a ring."""
    found: list[torch.Tensor | None] = [None] * axis.size
    moving = value.contiguous()
    found[axis.index] = moving
    for step in range(1, axis.size):
        moving = _shift(moving, axis)
        found[(axis.index - step) % axis.size] = moving
    return [item for item in found if item is not None]


def sum_round(shares: Sequence[torch.Tensor], axis: AxisGroup) -> torch.Tensor:
    """Return this process's shard of the sum over the axis (ring reduce-scatter of ``shares``)."""
    moving = shares[(axis.index - 1) % axis.size].contiguous()
    for step in range(2, axis.size + 1):
        moving = _shift(moving, axis) + shares[(axis.index - step) % axis.size]
    return moving


def _shift(value: torch.Tensor, axis: AxisGroup) -> torch.Tensor:
    """Send a tensor to the next process, and receive that of the one before."""
    found = torch.empty_like(value)
    following, before = axis.ranks[(axis.index + 1) % axis.size], axis.ranks[(axis.index - 1) % axis.size]
    # Together: NCCL runs what is issued between two processes in order, and in a ring of two both would send first.
    both = [
        dist.P2POp(dist.isend, value, following, group=axis.group),
        dist.P2POp(dist.irecv, found, before, group=axis.group),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return found


class LookUp(torch.nn.Module):
    """Embedding by the rows of the table that this process holds."""

    def __init__(self, op: Op, axis: AxisGroup) -> None:
        super().__init__()
        self._padding = int(dict(op.attributes).get("padding_idx", "-1"))
        self._axis = axis

    def forward(self, weight: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the rows of the table; zero for rows that other processes hold."""
        local = index - self._axis.index * len(weight)
        mine = (local >= 0) & (local < len(weight))
        padding = self._padding - self._axis.index * len(weight)
        own_padding = padding if self._padding >= 0 and 0 <= padding < len(weight) else None
        return F.embedding(local * mine, weight, padding_idx=own_padding) * mine.unsqueeze(-1)


class CrossEntropy(torch.nn.Module):
    """Cross entropy of logits whose classes (dim 1) are sharded over ``axis``.

    ``rows``: the other axes over which the targets are sharded.
    """

    def __init__(self, op: Op, axis: AxisGroup, rows: Sequence[AxisGroup]) -> None:
        super().__init__()
        attributes = dict(op.attributes)
        # As in torch: 1 is the mean, 2 the sum.
        self._is_mean = attributes.get("reduction", "1") == "1"
        self._ignored = int(attributes.get("ignore_index", "-100"))
        self._axis, self._rows = axis, tuple(rows)
        if attributes.get("reduction", "1") not in ("1", "2") or float(attributes.get("label_smoothing", "0")):
            raise refuse_share(op, "has label smoothing, or a loss per target (reduction='none')")
        if len(op.inputs) > 2:
            raise refuse_share(op, "has weights of classes")

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss: the same on every process of the axis, and a partial sum over the axes of ``rows``."""
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
    """Attention of a range of queries to all keys; under a causal mask, to the keys up to the last query."""

    def __init__(self, op: Op, axis: AxisGroup, call: torch.nn.Module) -> None:
        super().__init__()
        attributes = dict(op.attributes)
        self._is_causal = attributes.get("is_causal") == "True"
        self._axis, self._call = axis, call
        scale = attributes.get("scale")
        self._scale = float(scale) if scale not in (None, "None") else None
        self._is_grouped = attributes.get("enable_gqa") == "True"

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        """Return the attention of this process's queries, masked by their positions in the whole sequence."""
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
    """The op arange, as this process's shard of the numbers."""

    def __init__(self, axis: AxisGroup, call: torch.nn.Module) -> None:
        super().__init__()
        self._axis, self._call = axis, call

    def forward(self) -> torch.Tensor:
        """Return this process's shard of the numbers."""
        found: torch.Tensor = self._call()
        return found + self._axis.index * len(found)


class DropOut(torch.nn.Module):
    """Dropout by this process's shard of the mask; ``whole`` is the mask's shape, ``share(mask)`` cuts the shard."""

    def __init__(self, op: Op, whole: tuple[int, ...], share: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._kept, self._whole, self._share = 1.0 - float(dict(op.attributes)["p"]), whole, share

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value after dropout; all processes draw the same mask."""
        mask = torch.empty(self._whole, dtype=value.dtype, device=value.device).bernoulli_(self._kept)
        return value * self._share(mask.div_(self._kept))


class AddOnce(torch.nn.Module):
    """A matrix product of which each process has a partial sum; only the first process of the axis adds the bias.

    ``place``: the index of the bias among the arguments.
    """

    def __init__(self, place: int, axis: AxisGroup, call: torch.nn.Module) -> None:
        super().__init__()
        self._place, self._is_first, self._call = place, axis.index == 0, call

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        """Return this process's partial sum, with the bias on the first process."""
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
    """A sum of partial sums and of whole inputs: each of n processes adds 1/n of the whole ones.

    ``whole``: which inputs are whole; their gradient is whole, too. ``size`` is n.
    """

    def __init__(self, whole: tuple[bool, ...], size: int, call: torch.nn.Module) -> None:
        super().__init__()
        self._whole, self._size, self._call = whole, size, call

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        """Return this process's partial sum."""
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
    """A mean as a partial sum per process; every process of the axis has the same number of terms."""

    def __init__(self, size: int, call: torch.nn.Module) -> None:
        super().__init__()
        self._size, self._call = size, call

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        """Return the sum of this process's terms, divided by the number of all terms."""
        found: torch.Tensor = self._call(*given)
        return found / self._size


class RowLoss(torch.nn.Module):
    """A mean cross entropy whose targets are sharded: a partial sum per process, over the axes ``rows``."""

    def __init__(self, op: Op, rows: Sequence[AxisGroup]) -> None:
        super().__init__()
        attributes = dict(op.attributes)
        self._ignored = int(attributes.get("ignore_index", "-100"))
        self._smoothing = float(attributes.get("label_smoothing", "0"))
        self._rows = tuple(rows)

    def forward(self, logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """Return the sum of this process's losses over the count or weight of all targets that are not ignored."""
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
    """Return the PlanError for an op that cannot be sharded; ``why`` completes the sentence "op X, which …"."""
    return PlanError(
        f"The plan splits {op.name!r}, which {why}; such an op cannot be sharded here. Place the op whole "
        f"(`--placement '{op.name}=tensor'`), or plan without the axis."
    )
