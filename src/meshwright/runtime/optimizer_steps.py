"""Steps of optimizers: sharded states (ZeRO 1), repairs of staleness (`Repair`), loss scaling, and gradient clipping.

`ShardedBuckets`: each replica updates its shard of every bucket. The parameters of a bucket and their gradients are in
flat buffers, padded to shards of equal size. Gradients are reduce-scattered, the optimizer updates the slices of
parameters in its own shard, and the shards are all-gathered while the next step starts. An update must treat each
element by itself: the optimizer is tested for that (`check_elementwise`).
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from meshwright.program import Bucket, cut_pieces
from meshwright.program.buckets import Parts
from meshwright.runtime.agreed import AgreedNumber
from meshwright.runtime.fully_sharded import own_part
from meshwright.runtime.gradient_reduction import BucketBuffer, BucketExchange
from meshwright.runtime.precisions import set_gradient_type
from meshwright.runtime.rank_program import RankProgram
from meshwright.runtime.teams.grid import TeamPosition
from meshwright.runtime.transport import Transport
from meshwright.spec import Backward, OptimizerStep, Placement, Plan, PlanError, StageSlice, suggest
from meshwright.torch_names import all_gather_single, reduce_scatter_single

RepairKind = Literal["predict", "discount"]
REPAIRS: tuple[RepairKind, ...] = get_args(RepairKind)


# Training with delayed gradients under an asynchronous plan: a gradient that was computed with version v of a stage's
# weights makes version v + 1 + d; its staleness is d updates.
#
#     predict     read w + d (w - w') in place of w, with w' the version before: where the weights will be when the
#                 gradient arrives, if each update is like the last one. For SGD with momentum that is SpecTrain's
#                 prediction, for Adam that of XPipe.
#     discount    update with 1 / d ** p of the learning rate, where d > 1; p falls from 1 to 0 in ``fade_updates``
#                 updates, or stays 1. That is PipeMare's first technique.
#
# Sources: Chen, Yang, Cheng, "Efficient and Robust Parallel DNN Training through Model Parallelism on Multi-GPU
# Platform" (1809.02839, section 3.3); Guan et al., "XPipe" (1911.04610, section 3); Yang et al., "PipeMare"
# (1910.05124, section 3.1).
@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """A remedy for stale gradients of an asynchronous plan: ``predict`` weights, or ``discount`` the learning rate.

    ``fade_updates``: the number of updates in which a discount fades; 0 if it does not fade.
    """

    kind: RepairKind
    fade_updates: int = 0

    def __post_init__(self) -> None:
        if self.kind not in REPAIRS:
            raise PlanError(
                f"The repair {self.kind!r} was given{suggest(self.kind, REPAIRS)}; expected {' or '.join(REPAIRS)}."
            )
        if self.fade_updates < 0 or (self.fade_updates and self.kind != "discount"):
            raise PlanError(
                f"fade_updates (--repair-fade) is {self.fade_updates} for the repair '{self.kind}'; expected 0 or "
                "more for the repair 'discount', and 0 for 'predict'."
            )

    def rate(self, staleness: int, num_updates: int) -> float:
        """Return the factor (0..1] of the learning rate after ``num_updates`` updates, for a staleness in updates."""
        if self.kind != "discount" or staleness <= 1:
            return 1.0
        faded = min(num_updates / self.fade_updates, 1.0) if self.fade_updates else 0.0
        return float(staleness ** (faded - 1.0))


def check_repair(plan: Plan | Placement, repair: Repair | None) -> None:
    """Raise PlanError if a repair was given for a synchronous plan."""
    if repair is not None and not (isinstance(plan, Plan) and plan.is_asynchronous):
        what = f"the schedule {plan.schedule}" if isinstance(plan, Plan) else "a placement"
        raise PlanError(
            f"The repair {repair.kind} was given for {what}, which is synchronous: no gradient is stale. Leave the "
            "repair out."
        )


def find_staleness(body: RankProgram) -> dict[int, int]:
    """Return, by stage, its staleness: the most updates between reading the weights for a gradient and applying it."""
    found: dict[int, int] = {}
    used: dict[int, list[int]] = {}
    for item in body.computations:
        match item.instruction:
            case Backward(stage=stage, version=version):
                used.setdefault(stage, []).append(version)
            case OptimizerStep(stage=stage, version=version):
                stale = version - min(used.pop(stage, [version]))
                found[stage] = max(found.get(stage, 0), stale)
            case _:
                pass
    return found


_START, _GROWTH, _BACKOFF, _GROWTH_STEPS = 2.0**16, 2.0, 0.5, 2000


# Losses are multiplied by the scale, so that small gradients do not vanish in float16. Before the first update of a
# step a rank divides its gradients by the scale and notes whether one is not finite; the program's all-reduce over all
# ranks (`program.gradient_exchange`) sums these flags. If any is set, all ranks skip the step and halve the scale;
# after 2,000 steps in a row it is doubled (defaults of torch.amp.GradScaler).
class LossScale(AgreedNumber):
    """The factor of the losses (dynamic loss scaling), lowered when a gradient on any rank is not finite.

    The agreed number is the count of ranks with such a gradient. ``value`` is the current scale. ``unscales``:
    gradients are divided by the scale here; otherwise `HostSteps` multiplies them by ``inverse``. Other arguments as
    in `AgreedNumber`.
    """

    def __init__(
        self,
        index: int,
        parameters: Mapping[int, torch.nn.Parameter],
        complete: Callable[[], None],
        grid: TeamPosition,
        transport: Transport,
        device: torch.device,
        *,
        unscales: bool = True,
    ) -> None:
        super().__init__(index, complete, grid, transport, torch.float32, device)
        self.value, self._unscales = _START, unscales
        # The factor that the step's gradients still need, if they are not divided here.
        self.inverse = 1.0
        self._num_good = 0
        self._parameters = [item for item in parameters.values() if item.requires_grad]
        # Whether a number was agreed on that has not yet changed the scale.
        self._is_open = self._skips = False

    def _add_own(self) -> None:
        """Divide this process's gradients by the scale, and note whether one is not finite."""
        # Gradients that are copied meanwhile do not change: a product with 1 writes the same bits.
        self.inverse = 1.0 if self._unscales else 1.0 / self.value
        factor = 1.0 / self.value if self._unscales else 1.0
        own = [own_part(item.grad) for item in self._parameters if item.grad is not None]
        # Gradients may be on the host.
        for device in dict.fromkeys(item.device for item in own):
            found, inverse = torch.zeros(1, device=device), torch.full((1,), factor, device=device)
            gradients = [item for item in own if item.device == device]
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
            self._total += found.to(self._total.device)
        self._is_open = True

    def skips(self) -> bool:
        """Return whether the step is skipped because a gradient is not finite. Call it after the works of `begin`.

        The first call in a step updates the scale.
        """
        if self._is_open:
            self._is_open = False
            # Fake tensors, of a dry run, have no values.
            self._skips = not isinstance(self._total, FakeTensor) and bool(self._total.item())
            self._num_good = 0 if self._skips else self._num_good + 1
            if self._skips:
                self.value *= _BACKOFF
            elif self._num_good == _GROWTH_STEPS:
                self.value, self._num_good = self.value * _GROWTH, 0
        return self._skips

    def state(self) -> dict[str, float]:
        """Return the scale (``value``), and the number of good steps since it changed (``num_good``)."""
        return {"value": self.value, "num_good": self._num_good}

    def take_state(self, state: Mapping[str, float]) -> None:
        """Restore a `state`."""
        self.value, self._num_good = float(state["value"]), int(state["num_good"])


# torch.nn.utils.clip_grad_norm_ adds this to the norm.
_EPSILON = 1e-6


def with_clipping(plan: Plan | Placement, max_norm: float | None) -> Plan | Placement:
    """Return the plan with gradient clipping to ``max_norm``; the same plan if ``max_norm`` is None.

    Raises PlanError for a norm that is not positive, for a plan that clips without a norm, and for a placement.
    """
    if max_norm is None:
        if isinstance(plan, Plan) and plan.exchange.clip_norm:
            raise PlanError("The plan clips gradients, but no norm was given. Give it, for example --clip-norm 1.0.")
        return plan
    if not max_norm > 0:
        raise PlanError(f"The norm for gradient clipping (--clip-norm) is {max_norm}; expected more than 0.")
    if isinstance(plan, Placement):
        raise PlanError("Gradients cannot be clipped under a placement yet. Leave --clip-norm out, or plan by layers.")
    return replace(plan, exchange=replace(plan.exchange, clip_norm=True))


def count_holders(
    stages: Sequence[StageSlice], plan: Plan | Placement, alike: Callable[[int], int], shared_out: Collection[int]
) -> dict[int, int]:
    """Return, by tensor id of a parameter, the number of processes that hold a copy of it, or of the same shard.

    ``alike(i)``: how many processes of a team hold the same shard. Parameters in ``shared_out`` are sharded over a
    group of replicas, so that only one replica of each group holds the same shard.
    """
    ranks: defaultdict[int, set[int]] = defaultdict(set)
    for stage in stages:
        for parameter in stage.parameters:
            ranks[parameter].update(plan.stages[stage.index].ranks)
    return {
        parameter: (_num_groups(plan, len(found)) if parameter in shared_out else len(found)) * alike(parameter)
        for parameter, found in ranks.items()
    }


def _num_groups(plan: Plan | Placement, num_replicas: int) -> int:
    return num_replicas // plan.exchange.num_parts(num_replicas) if isinstance(plan, Plan) else 1


# Gradient clipping by the global norm: every parameter counts once, wherever its gradient is. A rank sums the squares
# of its gradients, each divided by the number of processes that hold a copy; the program's all-reduce over all ranks
# (`program.gradient_exchange`) sums them before the first update. All updates of the step are then multiplied by
# max_norm / (norm + 1e-6), at most 1, as in torch's clip_grad_norm_.
class NormClip(AgreedNumber):
    """Gradient clipping: the agreed number is the squared norm of all gradients of a step.

    ``max_norm``: the norm to clip to. ``holders``: by tensor id, the number of processes that hold a copy of a
    parameter (or of the same shard). ``inverse()``: the factor by which gradients are multiplied before clipping, to
    undo the loss scale. Other arguments as in `AgreedNumber`.
    """

    def __init__(
        self,
        index: int,
        max_norm: float,
        parameters: Mapping[int, torch.nn.Parameter],
        holders: Mapping[int, int],
        complete: Callable[[], None],
        grid: TeamPosition,
        transport: Transport,
        device: torch.device,
        inverse: Callable[[], float] = lambda: 1.0,
    ) -> None:
        super().__init__(index, complete, grid, transport, torch.float64, device)
        self._max_norm, self._inverse = max_norm, inverse
        self._parameters = [(item, 1.0 / holders[i]) for i, item in parameters.items() if item.requires_grad]

    def _add_own(self) -> None:
        for parameter, share in self._parameters:
            if parameter.grad is not None:
                self._total += share * own_part(parameter.grad).double().square().sum()

    def coefficient(self) -> torch.Tensor:
        """Return the factor for all gradients, at most 1. Call it after the works of `begin`."""
        norm = self._total[0].sqrt() * self._inverse()
        return (self._max_norm / (norm + _EPSILON)).clamp(max=1.0)


class ShardedBucket(BucketBuffer):
    """A bucket of which this rank updates shard number ``place`` of ``count``.

    ``values``: the flat buffer of all its parameters. ``own_values`` and ``own_gradients``: this rank's shard.
    ``pieces``: by tensor id, the slices of parameters in the shard, as parameters for the optimizer. ``starts``: the
    first element of each slice within its parameter.
    """

    def __init__(self, bucket: Bucket, parameters: Sequence[torch.nn.Parameter], place: int, count: int) -> None:
        super().__init__(bucket, parameters, count)
        self.tensors = bucket.parameters
        self.values = torch.zeros_like(self.flat, dtype=parameters[0].dtype if parameters else None)
        size = len(self.flat) // count
        self.own_values = self.values.narrow(0, place * size, size)
        # Sums overwrite this rank's gradients: NCCL allows that, and gloo sums in memory of its own.
        self.own_gradients = self.flat.narrow(0, place * size, size)
        self.pieces: dict[int, torch.nn.Parameter] = {}
        self.starts: dict[int, int] = {}
        self._gradients: dict[int, torch.Tensor] = {}
        sizes = [parameter.numel() for parameter in parameters]
        whole = self.values[: sum(sizes)].split(sizes)
        begin = 0
        for tensor, parameter, value, own in zip(
            bucket.parameters, parameters, whole, cut_pieces(sizes, place, count), strict=True
        ):
            start, begin = begin, begin + len(value)
            value.copy_(parameter.detach().reshape(-1))
            parameter.data = value.view(parameter.shape)
            if own:
                self.pieces[tensor] = torch.nn.Parameter(self.own_values[own.start : own.stop])
                self.starts[tensor] = place * size + own.start - start
                set_gradient_type(self.pieces[tensor], self.flat.dtype)
                self._gradients[tensor] = self.own_gradients[own.start : own.stop]

    def scatter(self, group: dist.ProcessGroup | None) -> dist.Work | None:
        """Start to reduce-scatter the gradients over the group; return the work."""
        # A parameter without a gradient has none on any replica.
        absent = {i for i, parameter in zip(self.tensors, self.parameters, strict=True) if parameter.grad is None}
        for tensor, piece in self.pieces.items():
            piece.grad = self._gradients[tensor] if tensor not in absent else None
        return reduce_scatter_single(self.own_gradients, self.flat, group=group, async_op=True)

    def gather(self, group: dist.ProcessGroup | None) -> dist.Work | None:
        """Start to all-gather the updated shards; return the work. Drops the gradients."""
        for parameter in self.parameters:
            parameter.grad = None
        # Not every backend can gather into the memory that it sends.
        own = self.own_values.clone()
        return all_gather_single(self.values, own, group=group, async_op=True)


class ShardedBuckets(BucketExchange):
    """Buckets of which this rank updates only its shard (ZeRO 1)."""

    def __init__(self, buckets: Sequence[ShardedBucket], parts: Parts) -> None:
        super().__init__(buckets, parts)
        self.sharded = {bucket.index: bucket for bucket in buckets}

    def to_sum(self, part: int) -> torch.Tensor:
        """Return this process's shard of a bucket's gradients, which groups of replicas sum with each other."""
        return self.sharded[part].own_gradients

    @property
    def starts(self) -> dict[int, int]:
        """The first element, within its parameter, of each slice that this rank updates, by tensor id."""
        return {tensor: start for bucket in self.sharded.values() for tensor, start in bucket.starts.items()}

    def pieces(self, parameters: dict[int, torch.nn.Parameter]) -> dict[int, torch.nn.Parameter]:
        """Return the tensors that this rank updates, by tensor id: its slices of parameters, and those in no bucket."""
        shared = {id(parameter) for bucket in self.sharded.values() for parameter in bucket.parameters}
        own = {tensor: parameter for tensor, parameter in parameters.items() if id(parameter) not in shared}
        for bucket in self.sharded.values():
            own |= bucket.pieces
        return {tensor: own[tensor] for tensor in parameters if tensor in own}


def check_elementwise(optimizer: torch.optim.Optimizer | None) -> None:
    """Raise PlanError if an optimizer updates slices of a tensor differently than the tensor, tested on small ones."""
    if optimizer is not None:
        # In a dry run, too, the test uses real tensors.
        with unset_fake_temporarily():
            _try_pieces(optimizer)


def _try_pieces(optimizer: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(4, 6, 4, generator=generator, dtype=torch.float64)
    whole = torch.nn.Parameter(start.clone())
    pieces = [torch.nn.Parameter(item.clone()) for item in start.flatten().split((9, 15))]
    name = type(optimizer).__name__
    try:
        make: Callable[..., torch.optim.Optimizer] = type(optimizer)
        accepted = inspect.signature(make).parameters
        options = {key: value for key, value in optimizer.defaults.items() if key in accepted}
        optimizers = make([whole], **options), make(pieces, **options)
        for gradient in gradients:
            whole.grad = gradient.clone()
            for piece, value in zip(pieces, gradient.flatten().split((9, 15)), strict=True):
                piece.grad = value.clone()
            for item in optimizers:
                item.step()
    except Exception as error:
        raise PlanError(
            f"The plan shards optimizer states (--zero 1), so that the optimizer updates slices of parameters; "
            f"{name} failed on such slices: {error} Choose another optimizer, or plan with --zero 0."
        ) from None
    if not torch.allclose(
        torch.cat([piece.detach() for piece in pieces]), whole.detach().flatten(), rtol=1e-9, atol=0.0
    ):
        raise PlanError(
            f"The plan shards optimizer states (--zero 1), so that the optimizer updates slices of parameters; "
            f"{name} updates slices of a tensor differently than the tensor. Choose an optimizer that treats each "
            "element by itself, such as AdamW, or plan with --zero 0."
        )
