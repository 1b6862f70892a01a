"""The peak of a device when a training framework lays a transformer out: Megatron-LM, PyTorch's FSDP2, Alpa.

Allocated bytes are the largest of a few moments; reserved ones add what the caching allocator holds for other streams.

Megatron-LM 0.14 with Transformer Engine 2.11, mixed precision:
    resident    parameter 2 + gradient 4 (--accumulate-allreduce-grads-in-fp32) + master and states 12 / (dp · cp) bytes
                with the distributed optimizer; experts are shared by dp · cp / ep ranks
                (megatron/core/distributed/param_and_grad_buffer.py, megatron/core/optimizer/distrib_optimizer.py)
    gradients that are added by the product itself still need an output: Transformer Engine keeps one of each shape
                (transformer_engine/pytorch/module/base.py, get_dummy_wgrad), the head takes one for a while
                (megatron/core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication)
    loss        fused: the gradient of the logits replaces them (transformer_engine/pytorch/cross_entropy.py)
    context parallel attention keeps its result before it is exchanged (release notes of 2.8)
FSDP2 and torchtitan, parameters in 4 bytes:
    resident    (parameter 4 + gradient 4 + states 8) / (dp · cp) bytes
    gathered    in 2 bytes: embedding, last norm and head all the time, one block and the next; with pipelines all
                blocks, and their gradients in 4 bytes (torchtitan, parallelize_llama.py: reshard_after_forward; torch,
                _fsdp_param.py: to_accumulated_grad_if_needed); what tensor parallelism gathers for a product is kept
                for its backward (torch, distributed/tensor/parallel/style.py: PrepareModuleInput, ColwiseParallel)
    loss        logits in 4 bytes: their logarithm of the softmax, its gradient, theirs; split over tp a product and a
                sum more (torch, distributed/tensor/parallel/loss.py); compiled, logits and their gradient in 2 bytes
    reserved    blocks belong to the stream that took them (torch, c10/cuda/CUDACachingAllocator.cpp): those of the
                largest gather (2 bytes) and of the largest reduction (4 bytes) are never used by computation
Alpa, mixed precision (alpa-projects/alpa, model_util.py: TrainState, optax_adafactor):
    resident    parameter 2 + gradient 2 bytes, with ZeRO-3 over dp, and master and states 12, with Adafactor 4, over dp
    gathered    with ZeRO-3 one block and the next, in 2 bytes
    loss        logits in 2 bytes, their logarithm of the softmax in 4
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from meshwright.cost.memory.transformer import head_bytes, in_flight, logits, saved_bytes
from meshwright.cost.parameters import count_parameters, gate_and_up
from meshwright.cost.transformer import HALF, SINGLE, layers_of_stage

if TYPE_CHECKING:
    from meshwright.cost.transformer import TrainingSetup, TransformerShape

Framework = Literal["megatron", "fsdp2", "alpa"]

# Master weight and Adam's two states in 4 bytes each.
_MASTER_AND_STATES = 12
# Workspace of cuBLAS on Hopper and later, of torch and of Transformer Engine each (torch, CUDABlas.cpp:
# parseChosenWorkspaceSize; transformer_engine/pytorch/module/base.py: get_cublas_workspace_size_bytes).
_CUBLAS_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeak:
    """Bytes of a device of the fullest stage: allocated by tensors, and reserved from the driver for them."""

    stage: int
    moment: str
    allocated_bytes: int
    reserved_bytes: int
    parts: dict[str, int]

    @property
    def owner(self) -> str:
        """The part that has most of the allocated bytes."""
        return max(self.parts, key=self.parts.__getitem__)


def predict_device_peak(
    shape: TransformerShape,
    setup: TrainingSetup,
    framework: Framework,
    *,
    fused_loss: bool,
    state_bytes: int = _MASTER_AND_STATES,
) -> DevicePeak:
    """The fullest device of a step; parts add up to the allocated bytes.

    ``state_bytes``: of Alpa's optimizer, per parameter, the master weight's included. Raises TransformerError for a
    setup in which the model cannot be laid out.
    """
    if framework == "alpa":
        peaks = [_alpa_peak(shape, setup, stage, state_bytes) for stage in range(setup.pp)]
    else:
        predict = _megatron_peak if framework == "megatron" else _fsdp2_peak
        peaks = [predict(shape, setup, stage, fused_loss=fused_loss) for stage in range(setup.pp)]
    return max(peaks, key=lambda peak: peak.allocated_bytes)


def activation_bytes(shape: TransformerShape, setup: TrainingSetup, stage: int) -> int:
    """What the layers of a stage keep of all microbatches in flight."""
    layers = sum(sum(saved_bytes(shape, setup, i).values()) for i in layers_of_stage(shape, setup, stage))
    return round(layers * in_flight(setup, stage))


def _megatron_peak(shape: TransformerShape, setup: TrainingSetup, stage: int, *, fused_loss: bool) -> DevicePeak:
    held = count_parameters(shape, setup, stage)
    stepped = held.share(setup) if setup.zero else held.dense + held.experts
    parts = {
        "parameters": HALF * (held.dense + held.experts),
        "gradients": SINGLE * (held.dense + held.experts),
        "optimizer states": _MASTER_AND_STATES * stepped,
        "activations": activation_bytes(shape, setup, stage),
        "unused weight gradients": HALF * sum(rows * columns for rows, columns in held.products),
        "workspace": 2 * _CUBLAS_BYTES,
    }
    if setup.cp > 1 and setup.recompute != "full":
        width = shape.heads * shape.head_dim // setup.tp
        count = len(layers_of_stage(shape, setup, stage)) * in_flight(setup, stage)
        parts["activations"] += round(HALF * setup.tokens * width * count)
    moments = {"backward of a layer": {"workspace": _backward_bytes(shape, setup)}}
    if stage == setup.pp - 1:
        num_logits = logits(shape, setup)
        per_logit = HALF if fused_loss else HALF + 2 * SINGLE
        moments["loss"] = {
            "activations": head_bytes(shape, setup),
            "logits": per_logit * num_logits,
            "workspace": HALF * (shape.vocab * shape.hidden // setup.tp + setup.tokens * shape.hidden),
        }
    return _fullest(stage, parts, moments, reserved=0)


def _fsdp2_peak(shape: TransformerShape, setup: TrainingSetup, stage: int, *, fused_loss: bool) -> DevicePeak:
    held = count_parameters(shape, setup, stage)
    ranks, count = setup.dp * setup.cp, held.dense + held.experts
    root = held.embedding + held.head
    # Products keep the inputs that tensor parallelism gathers for them, two in a layer and one in the head.
    gathered = HALF * setup.tokens * shape.hidden if setup.tp > 1 else 0
    parts = {
        "parameters": SINGLE * count // ranks,
        "gradients": SINGLE * count // ranks,
        "optimizer states": 2 * SINGLE * count // ranks,
        "gathered parameters": HALF * (count if setup.pp > 1 else root + 2 * held.largest_layer),
        "activations": activation_bytes(shape, setup, stage),
        "workspace": _CUBLAS_BYTES,
    }
    if setup.recompute == "none":
        count_kept = len(layers_of_stage(shape, setup, stage)) * in_flight(setup, stage)
        parts["activations"] += round(2 * gathered * count_kept)
    if setup.pp > 1:
        parts["gradients"] += SINGLE * count
    again = sum(saved_bytes(shape, replace(setup, recompute="none"), layer=0).values()) + 2 * gathered
    backward = _backward_bytes(shape, setup) + (again if setup.recompute != "none" else 0)
    moments = {"backward of a layer": {"workspace": backward + HALF * held.largest_layer}}
    if stage == setup.pp - 1:
        per_logit = 2 * HALF if fused_loss else (4 if setup.tp > 1 else 3) * SINGLE
        moments["loss"] = {
            "activations": head_bytes(shape, setup) + gathered,
            "logits": per_logit * logits(shape, setup),
        }
    return _fullest(stage, parts, moments, reserved=(HALF + SINGLE) * max(root, held.largest_layer))


def _alpa_peak(shape: TransformerShape, setup: TrainingSetup, stage: int, state_bytes: int) -> DevicePeak:
    held = count_parameters(shape, setup, stage)
    count, ranks = held.dense + held.experts, setup.dp * setup.cp
    kept = held.share(setup) if setup.zero == 3 else count
    parts = {
        "parameters": HALF * kept,
        "gradients": HALF * kept,
        "optimizer states": state_bytes * (held.share(setup) if setup.zero else count),
        "gathered parameters": 2 * HALF * held.largest_layer if setup.zero == 3 and ranks > 1 else 0,
        "activations": activation_bytes(shape, setup, stage),
    }
    again = sum(saved_bytes(shape, replace(setup, recompute="none"), layer=0).values())
    moments = {"backward of a layer": {"workspace": _backward_bytes(shape, setup) + again}}
    if stage == setup.pp - 1:
        moments["loss"] = {
            "activations": head_bytes(shape, setup),
            "logits": (HALF + SINGLE) * logits(shape, setup),
        }
    return _fullest(stage, parts, moments, reserved=0)


def _backward_bytes(shape: TransformerShape, setup: TrainingSetup) -> int:
    """Gradients while the widest product of a layer goes backward: of its input and of its wide output."""
    wide = gate_and_up(shape) // setup.tp
    if shape.experts is not None:
        experts = shape.experts
        wide = max(wide, experts.top_k * (experts.columns + shape.hidden) // setup.tp)
    return HALF * setup.tokens * (wide + shape.hidden)


def _fullest(stage: int, parts: dict[str, int], moments: dict[str, dict[str, int]], *, reserved: int) -> DevicePeak:
    """The moment that takes most beside what is there at all of them."""
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    sums = dict(parts)
    for part, num_bytes in moments[moment].items():
        sums[part] = sums.get(part, 0) + num_bytes
    total = sum(sums.values())
    return DevicePeak(stage=stage, moment=moment, allocated_bytes=total, reserved_bytes=total + reserved, parts=sums)
