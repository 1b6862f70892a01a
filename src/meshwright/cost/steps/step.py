"""What a training step of a model consists of, from the prices of its ops: the times of its stages and of its exchange.

    stage     Σ layers (forward + recompute + input gradients + weight gradients) + embedding or head + transfers
    hidden    a collective that runs beside work takes what outlasts that, and what it keeps from it meanwhile

How the stages, the exchange of gradients and the optimizer lie in time is for whoever simulates them to say
(`meshwright.validation.pipeline_programs`). What the software hides is said by `software`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from meshwright.cost.parameters import layer_parameters
from meshwright.cost.residual import ResidualShape
from meshwright.cost.steps.convolutions import residual_ops
from meshwright.cost.steps.gradients import (
    add_sharding,
    count_buckets,
    gather_seconds,
    gradient_bytes,
    optimizer_seconds,
    outlasting,
    stage_parameters,
    sum_seconds,
    tied_seconds,
)
from meshwright.cost.steps.ops import embedding_ops, head_ops, layer_ops, recomputed_ops
from meshwright.cost.steps.pacing import count_kernels, paced
from meshwright.cost.steps.pipeline import StageSeconds
from meshwright.cost.transformer import HALF, TransformerShape, layers_of_stage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshwright.cost.collectives import CollectiveOp
    from meshwright.cost.steps.counted import CountedOp
    from meshwright.cost.steps.gradients import Shape
    from meshwright.cost.steps.prices import StepPrices
    from meshwright.cost.steps.software import Software

# Products beside which the collectives of a group run: those that split the columns of their matrix; attention.
_BESIDE = {
    "tensor": frozenset({"qkv", "up", "query up", "kv up"}),
    "context": frozenset({"attention", "scores", "values"}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """What a step consists of: its stages, and how their replicas exchange gradients after the last microbatch.

    ``num_buckets``: messages in which the replicas of a stage sum its gradients, none where there is one replica or
    passes do it; beside the last backward (``overlaps``) or after it. ``shards``: sums are scattered, and parameters
    gathered. ``tied_s``: for how long the first and the last stage sum gradients of an embedding that they share.
    ``clips``: all wait for the norm of all gradients. ``rolls``: each goes on with the next step when it is done.
    """

    stages: tuple[StageSeconds, ...]
    num_buckets: int
    overlaps: bool
    shards: bool
    tied_s: float
    clips: bool
    rolls: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSeconds:
    """One layer for one microbatch, s; recomputing stands with the input gradients, which wait for it.

    ``host_s`` and ``device_s``: for how long it keeps the host and the device busy; the other three are paced by both.
    """

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float
    host_s: float
    device_s: float


def predict_step(shape: Shape, prices: StepPrices, software: Software) -> StepSeconds:
    """What one optimizer step of the model consists of, laid out as ``prices.setup`` says.

    Raises TransformerError for a setup in which the model cannot be laid out.
    """
    setup = prices.setup
    parameters = [stage_parameters(shape, setup, stage) for stage in range(setup.pp)]
    num_buckets = count_buckets(prices, software, max(parameters, key=sum))
    return StepSeconds(
        stages=tuple(
            replace(
                stage,
                sum_s=sum_seconds(prices, held.part(num_buckets)) if num_buckets else 0.0,
                gather_s=gather_seconds(prices, held.part(num_buckets)) if num_buckets else 0.0,
                optimizer_s=optimizer_seconds(prices, software, held),
            )
            for stage, held in zip(_stages(shape, prices, software), parameters, strict=True)
        ),
        num_buckets=num_buckets,
        overlaps=software.hides_gradients(setup.pp),
        shards=setup.zero == 1,
        tied_s=tied_seconds(shape, prices),
        clips=software.clips(setup.schedule),
        rolls=software.rolls(setup.schedule),
    )


def _stages(shape: Shape, prices: StepPrices, software: Software) -> tuple[StageSeconds, ...]:
    if isinstance(shape, ResidualShape):
        return (_sum_up([predict_layer(shape, prices, software)], shape, prices, software, 0),)
    layers = {kind: predict_layer(shape, prices, software, kind) for kind in _kinds(shape)}
    return tuple(_stage(shape, prices, software, layers, stage) for stage in range(prices.setup.pp))


def predict_layer(shape: Shape, prices: StepPrices, software: Software, layer: int = 0) -> LayerSeconds:
    """Seconds of one layer for one microbatch, collectives of its groups included; a residual network is one layer."""
    setup = prices.setup
    if isinstance(shape, ResidualShape):
        return _edge(residual_ops(shape, setup), prices, software)
    ops = _ops_of(shape, prices, layer)
    again = _computed_again(ops, setup.recompute, software)
    recomputed = _part(again, "forward", prices, software)
    parameters = layer_parameters(shape, setup, layer)
    width = gradient_bytes(prices)
    accumulated = 0.0 if setup.zero >= 2 else parameters * width * (1 if software.fused_accumulation else 3)
    adding = prices.pass_seconds(accumulated) if accumulated else 0.0
    if not software.adds_first:
        adding *= 1.0 - 1.0 / setup.num_microbatches
    return _pace(
        _part(ops, "forward", prices, software),
        recomputed + _part(ops, "input_gradient", prices, software),
        adding + _part(ops, "weight_gradient", prices, software),
        [op for op in ops if op.part == "forward"],
        [*(op for op in again if op.part == "forward"), *(op for op in ops if op.part != "forward")],
        _host_seconds(prices, software),
    )


def _host_seconds(prices: StepPrices, software: Software) -> float:
    return 0.0 if software.compiled else prices.efficiencies.host_s


def _computed_again(ops: tuple[CountedOp, ...], recompute: str, software: Software) -> tuple[CountedOp, ...]:
    """What of a layer runs again in the backward; with all of it, the collectives of its forward, too."""
    if recompute != "full":
        return recomputed_ops(ops, recompute)
    if not software.stops_early:
        return ops
    halved = {"reduce_scatter", "all_reduce"}
    return tuple(
        replace(op, count=op.count / 2) if op.group == "tensor" and op.op in halved else op
        for op in ops
        if op.name != "down"
    )


def _pace(
    forward_s: float,
    input_gradient_s: float,
    weight_gradient_s: float,
    forward_ops: Sequence[CountedOp],
    backward_ops: Sequence[CountedOp],
    host_s: float,
) -> LayerSeconds:
    """Device seconds of the parts as a host paces them that starts these kernels; both gradients by one factor."""
    forward_host_s, backward_host_s = (host_s * count_kernels(ops) for ops in (forward_ops, backward_ops))
    backward_s = input_gradient_s + weight_gradient_s
    stretch = paced(backward_s, backward_host_s) / backward_s if backward_s else 1.0
    return LayerSeconds(
        forward_s=paced(forward_s, forward_host_s),
        input_gradient_s=input_gradient_s * stretch,
        weight_gradient_s=weight_gradient_s * stretch,
        host_s=forward_host_s + backward_host_s,
        device_s=forward_s + backward_s,
    )


def _stage(
    shape: TransformerShape, prices: StepPrices, software: Software, layers: Mapping[int, LayerSeconds], stage: int
) -> StageSeconds:
    setup = prices.setup
    mine = [layers[_kind_of(shape, layer)] for layer in layers_of_stage(shape, setup, stage)]
    if stage == 0:
        mine.append(_edge(embedding_ops(shape, setup, by_products=software.embeds_by_products), prices, software))
    if stage == setup.pp - 1:
        mine.append(_edge(head_ops(shape, setup), prices, software))
    transfers = 0.0
    if setup.pp > 1:
        # Each of the tensor group's devices sends its share (scatter/gather; sequence parallelism).
        whole = HALF * setup.tokens * shape.hidden
        message = prices.collective_seconds("pipeline", "send", whole / setup.tp)
        if software.gathers_messages and not setup.sequence_parallel:
            message += prices.collective_seconds("tensor", "all_gather", whole)
        transfers = 2 * setup.chunks * message
    return replace(_sum_up(mine, shape, prices, software, stage), transfer_s=transfers)


def _sum_up(
    layers: Sequence[LayerSeconds], shape: Shape, prices: StepPrices, software: Software, stage: int
) -> StageSeconds:
    """The layers of a stage one after the other, with what passes do for shards of its parameters."""
    found = StageSeconds(
        forward_s=sum(layer.forward_s for layer in layers),
        input_gradient_s=sum(layer.input_gradient_s for layer in layers),
        weight_gradient_s=sum(layer.weight_gradient_s for layer in layers),
    )
    if prices.setup.zero < 2:
        return found
    num_layers = len(layers_of_stage(shape, prices.setup, stage)) if isinstance(shape, TransformerShape) else 1
    return add_sharding(found, prices, software, stage_parameters(shape, prices.setup, stage), num_layers)


def _edge(ops: tuple[CountedOp, ...], prices: StepPrices, software: Software) -> LayerSeconds:
    """Ops one after the other, of an embedding, a head or a whole network."""
    forward, inputs, weights = (
        [op for op in ops if op.part == part] for part in ("forward", "input_gradient", "weight_gradient")
    )
    totals = (prices.total(forward), prices.total(inputs), prices.total(weights))
    return _pace(*totals, forward, [*inputs, *weights], _host_seconds(prices, software))


def _part(ops: tuple[CountedOp, ...], part: str, prices: StepPrices, software: Software) -> float:
    """Seconds of one part of a layer; collectives that run beside products only as far as they outlast them."""
    seconds = sum(op.count * _message(op, prices, software) for op in ops if op.part == part and op.hidden_by is None)
    hidden: dict[tuple[str, str], float] = {}
    for op in ops:
        if op.part != part or op.hidden_by is None:
            continue
        if op.group == "tensor" and not software.hidden_tensor_parallel:
            seconds += op.count * _message(op, prices, software)
        else:
            key = (op.group, op.hidden_by)
            hidden[key] = hidden.get(key, 0.0) + op.count * prices.seconds(op)
    for (group, beside), needed in hidden.items():
        work = prices.total(op for op in ops if op.part == beside and op.name in _BESIDE[group])
        seconds += outlasting(prices, needed, work)
    return seconds


def _message(op: CountedOp, prices: StepPrices, software: Software) -> float:
    """Seconds of an op, of a collective of the tensor group as the software sends it; any other op as it is."""
    if op.group != "tensor":
        return prices.seconds(op)
    if op.hidden_by == "input_gradient" and not software.regathers_inputs:
        return 0.0
    eight_bits = prices.setup.precision == "fp8" and software.gathers_in_8_bits and op.op == "all_gather"
    needed = prices.collective_seconds("tensor", cast("CollectiveOp", op.op), op.num_bytes / (2 if eight_bits else 1))
    # Cut into as many pieces as there are ranks, all but one overlap with products, which take longer.
    return needed / prices.setup.tp if software.async_tensor_parallel else needed


def _kinds(shape: TransformerShape) -> tuple[int, ...]:
    return tuple(sorted({_kind_of(shape, layer) for layer in range(shape.layers)}))


def _kind_of(shape: TransformerShape, layer: int) -> int:
    """The first layer that is like this one, so that equal layers are priced once."""
    dense = shape.is_dense(layer)
    return next(first for first in range(layer + 1) if shape.is_dense(first) == dense)


@lru_cache(maxsize=4096)
def _cached_ops(shape: TransformerShape, setup: object, layer: int) -> tuple[CountedOp, ...]:
    return layer_ops(shape, setup, layer)  # type: ignore[arg-type]


def _ops_of(shape: TransformerShape, prices: StepPrices, layer: int) -> tuple[CountedOp, ...]:
    return _cached_ops(shape, prices.setup, layer)
