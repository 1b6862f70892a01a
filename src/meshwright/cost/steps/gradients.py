"""What replicas of a stage exchange in a step, and what its optimizer takes.

    zero 0    gradients are all-reduced once per step
    zero 1    reduce-scattered once per step, and parameters gathered
    zero 2    reduce-scattered beside every backward; parameters gathered beside every forward
    zero 3    gathered beside every backward, too

All dp · cp replicas hold what is not of experts; of an expert there are dp · cp / ep.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from meshwright.cost.parameters import count_parameters
from meshwright.cost.residual import ResidualShape
from meshwright.cost.transformer import HALF, SINGLE, TransformerShape

if TYPE_CHECKING:
    from meshwright.cost.collectives import CollectiveOp
    from meshwright.cost.steps.pipeline import StageSeconds
    from meshwright.cost.steps.prices import StepPrices
    from meshwright.cost.steps.software import Software
    from meshwright.cost.transformer import TrainingSetup

Shape = TransformerShape | ResidualShape


class Held(NamedTuple):
    """Parameters of a stage on one device: those of all replicas, and those of its experts."""

    dense: float
    experts: float

    def part(self, count: int) -> Held:
        """One of so many equal parts."""
        return Held(self.dense / count, self.experts / count)


# Bytes of the optimizer's step per parameter: Adam reads gradient, weight and two states and writes the last three
# (28), the norm reads (4), clipping reads and writes (8). Copies: master to model (6); gradients set to zero (fp16: 2,
# bf16: 4), and fp16 ones copied to single precision (6) and unscaled in place (8).
_ADAM_BYTES = 40
_COPY_BYTES = {"fp16": 6 + 16, "bf16": 6 + 4, "fp8": 6 + 4, "fp32": 0}
# Multiprocessors that NCCL's kernels occupy in a node of eight devices on a switch: a channel each, of which NCCL opens
# 24 on a DGX A100 (its log: "24 coll channels").
_NCCL_CHANNELS = 24
# Of DistributedDataParallel (torch documentation, bucket_cap_mb).
_BUCKET_BYTES = 25 * 2**20


def add_sharding(
    stage: StageSeconds, prices: StepPrices, software: Software, held: Held, num_layers: int
) -> StageSeconds:
    """Gathers of parameters and scatters of gradients, per microbatch, beside its work."""
    setup, width = prices.setup, _parameter_bytes(prices)
    gather = _message_seconds(prices, "all_gather", width, held)
    scatter = _message_seconds(prices, "reduce_scatter", SINGLE if software.reduces_single else width, held)
    backward = scatter + (gather if setup.zero == 3 else 0.0)
    forward_s, weight_gradient_s = stage.forward_s, stage.weight_gradient_s
    if not software.hides_gradients(setup.pp):
        return replace(stage, forward_s=forward_s + gather, weight_gradient_s=weight_gradient_s + backward)
    if setup.pp > 1 and software.gathers_once_in_pipelines:
        gather, scatter, backward = (seconds / setup.num_microbatches for seconds in (gather, scatter, scatter))
    # The first layer's gather and the last one's scatter have nothing to hide behind.
    beside = stage.input_gradient_s + weight_gradient_s
    return replace(
        stage,
        forward_s=forward_s + outlasting(prices, gather, forward_s) + gather / num_layers,
        weight_gradient_s=weight_gradient_s + outlasting(prices, backward, beside) + scatter / num_layers,
    )


def count_buckets(prices: StepPrices, software: Software, held: Held) -> int:
    """In how many messages a stage's gradients are summed after the last microbatch; beside its backward in several."""
    setup = prices.setup
    if setup.zero >= 2 or setup.dp * setup.cp == 1:
        return 0
    if not software.hides_gradients(setup.pp):
        return 1
    return ceil(gradient_bytes(prices) * sum(held) / _BUCKET_BYTES)


def sum_seconds(prices: StepPrices, held: Held) -> float:
    """Gradients of these parameters are summed: by all-reduce, with zero 1 by reduce-scatter."""
    op: CollectiveOp = "reduce_scatter" if prices.setup.zero == 1 else "all_reduce"
    return _message_seconds(prices, op, gradient_bytes(prices), held)


def gather_seconds(prices: StepPrices, held: Held) -> float:
    """These parameters are gathered when they are updated; nothing but with zero 1."""
    return _message_seconds(prices, "all_gather", _parameter_bytes(prices), held) if prices.setup.zero == 1 else 0.0


def _message_seconds(prices: StepPrices, op: CollectiveOp, width: int, held: Held) -> float:
    dense_s = prices.collective_seconds("data", op, width * held.dense)
    return dense_s + (prices.collective_seconds("expert data", op, width * held.experts) if held.experts else 0.0)


def tied_seconds(shape: Shape, prices: StepPrices) -> float:
    """The first and the last stage sum gradients of an embedding that both hold."""
    setup = prices.setup
    if setup.pp == 1 or isinstance(shape, ResidualShape) or not shape.tied:
        return 0.0
    table = shape.vocab * shape.hidden / setup.tp
    return prices.collective_seconds("embedding", "all_reduce", gradient_bytes(prices) * table)


def optimizer_seconds(prices: StepPrices, software: Software, held: Held) -> float:
    """One pass over the states of these parameters, or of a rank's share of them."""
    setup = prices.setup
    copies = 0 if setup.zero >= 2 else _COPY_BYTES[setup.precision]
    ranks = setup.dp * setup.cp if setup.zero else 1
    stepped = held.dense / ranks + held.experts / max(ranks // setup.ep, 1)
    return prices.pass_seconds(stepped * (software.optimizer_bytes or _ADAM_BYTES + copies))


def stage_parameters(shape: Shape, setup: TrainingSetup, stage: int) -> Held:
    """What one device of a stage holds."""
    if isinstance(shape, ResidualShape):
        return Held(shape.num_parameters, 0)
    found = count_parameters(shape, setup, stage)
    return Held(found.dense, found.experts)


def gradient_bytes(prices: StepPrices) -> int:
    """Bytes of a gradient: Megatron-LM keeps fp16 ones in 16 bits and adds bf16 ones in single precision."""
    return HALF if prices.setup.precision == "fp16" else SINGLE


def _parameter_bytes(prices: StepPrices) -> int:
    return SINGLE if prices.setup.precision == "fp32" else HALF


def outlasting(prices: StepPrices, messages_s: float, work_s: float) -> float:
    """What messages add to the work beside them: NCCL's kernels keep some multiprocessors from it meanwhile."""
    taken = min(_NCCL_CHANNELS / (prices.kind.num_multiprocessors or _NCCL_CHANNELS), 1.0)
    return max(messages_s - work_s, 0.0) + taken * min(messages_s, work_s)
