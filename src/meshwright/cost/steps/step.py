"""How long a training step of a transformer takes, in closed form from the prices of its ops.

    step      pipeline(stages) + gradients + tied embedding + optimizer
    stage     Σ layers (forward + recompute + input gradients + weight gradients) + embedding or head + transfers
    hidden    a collective that runs beside work w takes max(0, its seconds - w)

Gradients are reduced once per step (zero 0: all-reduce; 1: reduce-scatter, and parameters gathered) or per microbatch
(zero 2 and 3: reduce-scatter beside the backward; parameters gathered beside forward, with 3 beside the backward too).
What the software hides is said by `software`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from meshwright.cost.parameters import count_parameters, layer_parameters
from meshwright.cost.steps.ops import embedding_ops, head_ops, layer_ops, recomputed_ops
from meshwright.cost.steps.pacing import count_kernels, paced
from meshwright.cost.steps.pipeline import StageSeconds, pipeline_seconds
from meshwright.cost.transformer import HALF, SINGLE, layers_of_stage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshwright.cost.collectives import CollectiveOp
    from meshwright.cost.steps.ops import CountedOp
    from meshwright.cost.steps.prices import StepPrices
    from meshwright.cost.steps.software import Software
    from meshwright.cost.transformer import TransformerShape

# Products beside which the collectives of a group run: those that split the columns of their matrix; attention.
_BESIDE = {
    "tensor": frozenset({"qkv", "up", "query up", "kv up"}),
    "context": frozenset({"attention", "scores", "values"}),
}
# Bytes of the optimizer's step per parameter: Adam reads gradient, weight and two states and writes the last three
# (28), the norm reads (4), clipping reads and writes (8). Copies: master to model (6); gradients set to zero (fp16: 2,
# bf16: 4), and fp16 ones copied to single precision (6) and unscaled in place (8).
_ADAM_BYTES = 40
_COPY_BYTES = {"fp16": 6 + 16, "bf16": 6 + 4, "fp8": 6 + 4}
# Multiprocessors that NCCL's kernels occupy in a node of eight devices on a switch: a channel each, of which NCCL opens
# 24 on a DGX A100 (its log: "24 coll channels").
_NCCL_CHANNELS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """A step and its parts, s: the pipeline with its bubble, gradients reduced after it, and the optimizer.

    ``stages``: what the pipeline consists of.
    """

    stages: tuple[StageSeconds, ...]
    pipeline_s: float
    bubble_s: float
    gradients_s: float
    optimizer_s: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.pipeline_s + self.rest_s

    @property
    def rest_s(self) -> float:
        """What follows the pipeline."""
        return self.gradients_s + self.optimizer_s


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


def predict_step(shape: TransformerShape, prices: StepPrices, software: Software) -> StepSeconds:
    """Seconds of one optimizer step of the model, laid out as ``prices.setup`` says.

    Raises TransformerError for a setup in which the model cannot be laid out.
    """
    setup = prices.setup
    layers = {kind: predict_layer(shape, prices, software, kind) for kind in _kinds(shape)}
    stages = tuple(_stage(shape, prices, software, layers, stage) for stage in range(setup.pp))
    pipeline = pipeline_seconds(stages, setup.num_microbatches, setup.schedule, setup.chunks)
    parameters = max(_stage_parameters(shape, prices, stage) for stage in range(setup.pp))
    return StepSeconds(
        stages=stages,
        pipeline_s=pipeline,
        bubble_s=pipeline - setup.num_microbatches * max(stage.seconds for stage in stages),
        gradients_s=_reduce_gradients(shape, prices, software, parameters, max(s.input_gradient_s for s in stages)),
        optimizer_s=_optimizer(prices, parameters),
    )


def predict_layer(shape: TransformerShape, prices: StepPrices, software: Software, layer: int = 0) -> LayerSeconds:
    """Seconds of one layer for one microbatch, collectives of its groups included."""
    setup = prices.setup
    ops = _ops_of(shape, prices, layer)
    again = _computed_again(ops, setup.recompute, software)
    recomputed = _part(again, "forward", prices, software)
    parameters = layer_parameters(shape, setup, layer)
    width = _gradient_bytes(prices, software)
    accumulated = 0.0 if setup.zero >= 2 else parameters * width * (1 if software.fused_accumulation else 3)
    adding = prices.pass_seconds(accumulated) if accumulated else 0.0
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
    num_layers = len(mine)
    if stage == 0:
        mine.append(_edge(embedding_ops(shape, setup), prices, software))
    if stage == setup.pp - 1:
        mine.append(_edge(head_ops(shape, setup), prices, software))
    parts = {
        part: sum(getattr(layer, f"{part}_s") for layer in mine)
        for part in ("forward", "input_gradient", "weight_gradient")
    }
    if setup.zero >= 2:
        _add_sharding(parts, prices, software, _stage_parameters(shape, prices, stage), num_layers)
    transfers = 0.0
    if setup.pp > 1:
        # Each of the tensor group's devices sends its share (scatter/gather; sequence parallelism).
        whole = HALF * setup.tokens * shape.hidden
        message = prices.collective_seconds("pipeline", "send", whole / setup.tp)
        if software.gathers_messages and not setup.sequence_parallel:
            message += prices.collective_seconds("tensor", "all_gather", whole)
        transfers = 2 * setup.chunks * message
    return StageSeconds(
        forward_s=parts["forward"],
        input_gradient_s=parts["input_gradient"],
        weight_gradient_s=parts["weight_gradient"],
        transfer_s=transfers,
    )


def _edge(ops: tuple[CountedOp, ...], prices: StepPrices, software: Software) -> LayerSeconds:
    """The embedding or the head, whose collectives are not counted."""
    forward, inputs, weights = (
        [op for op in ops if op.part == part] for part in ("forward", "input_gradient", "weight_gradient")
    )
    totals = (prices.total(forward), prices.total(inputs), prices.total(weights))
    return _pace(*totals, forward, [*inputs, *weights], _host_seconds(prices, software))


def _add_sharding(
    parts: dict[str, float], prices: StepPrices, software: Software, parameters: float, num_layers: int
) -> None:
    """Gathers of parameters and scatters of gradients, per microbatch, as far as they outlast the work beside them.

    While they run beside it, NCCL's kernels keep some multiprocessors from the work.
    """
    setup, width = prices.setup, _parameter_bytes(software)
    gather = prices.collective_seconds("data", "all_gather", width * parameters)
    reduced = SINGLE if software.reduces_single else width
    scatter = prices.collective_seconds("data", "reduce_scatter", reduced * parameters)
    backward = scatter + (gather if setup.zero == 3 else 0.0)
    if not software.hides_gradients(setup.pp):
        parts["forward"] += gather
        parts["weight_gradient"] += backward
        return
    if setup.pp > 1 and software.gathers_once_in_pipelines:
        gather, scatter, backward = (seconds / setup.num_microbatches for seconds in (gather, scatter, scatter))
    taken = min(_NCCL_CHANNELS / (prices.kind.num_multiprocessors or _NCCL_CHANNELS), 1.0)
    # The first layer's gather and the last one's scatter have nothing to hide behind.
    beside = parts["input_gradient"] + parts["weight_gradient"]
    parts["weight_gradient"] += _outlasting(backward, beside, taken) + scatter / num_layers
    parts["forward"] += _outlasting(gather, parts["forward"], taken) + gather / num_layers


def _outlasting(messages_s: float, work_s: float, taken: float) -> float:
    """What messages add to the work that they run beside, which they slow down meanwhile."""
    return max(messages_s - work_s, 0.0) + taken * min(messages_s, work_s)


def _reduce_gradients(
    shape: TransformerShape, prices: StepPrices, software: Software, parameters: float, backward_s: float
) -> float:
    setup = prices.setup
    width = _gradient_bytes(prices, software)
    tied = 0.0
    if setup.pp > 1 and shape.tied:
        table = shape.vocab * shape.hidden / setup.tp
        tied = prices.collective_seconds("embedding", "all_reduce", width * table)
    if setup.zero >= 2:
        return tied
    if setup.zero == 1:
        scatter = prices.collective_seconds("data", "reduce_scatter", width * parameters)
        reduction = scatter + prices.collective_seconds("data", "all_gather", _parameter_bytes(software) * parameters)
    else:
        reduction = prices.collective_seconds("data", "all_reduce", width * parameters)
    if software.hides_gradients(setup.pp):
        reduction = max(reduction - backward_s, 0.0)
    return tied + reduction


def _optimizer(prices: StepPrices, parameters: float) -> float:
    setup = prices.setup
    copies = 0 if setup.zero >= 2 else _COPY_BYTES[setup.precision]
    sharded = parameters / (setup.dp * setup.cp) if setup.zero else parameters
    return prices.pass_seconds(sharded * (_ADAM_BYTES + copies))


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
        seconds += max(needed - work, 0.0)
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


def _stage_parameters(shape: TransformerShape, prices: StepPrices, stage: int) -> int:
    """Parameters of a stage on one device, its experts' included."""
    held = count_parameters(shape, prices.setup, stage)
    return held.dense + held.experts


def _gradient_bytes(prices: StepPrices, software: Software) -> int:
    # Megatron-LM keeps fp16 gradients in 16 bits and adds bf16 ones in single precision (arguments.py).
    return HALF if prices.setup.precision == "fp16" and not software.sends_single else SINGLE


def _parameter_bytes(software: Software) -> int:
    return SINGLE if software.sends_single else HALF


def _kinds(shape: TransformerShape) -> tuple[int, ...]:
    return tuple(sorted({_kind_of(shape, 0), _kind_of(shape, shape.layers - 1)}))


def _kind_of(shape: TransformerShape, layer: int) -> int:
    """The first layer that is like this one, so that equal layers are priced once."""
    if shape.experts is None or layer < shape.experts.num_dense_layers:
        return 0
    return shape.experts.num_dense_layers


@lru_cache(maxsize=4096)
def _cached_ops(shape: TransformerShape, setup: object, layer: int) -> tuple[CountedOp, ...]:
    return layer_ops(shape, setup, layer)  # type: ignore[arg-type]


def _ops_of(shape: TransformerShape, prices: StepPrices, layer: int) -> tuple[CountedOp, ...]:
    return _cached_ops(shape, prices.setup, layer)
