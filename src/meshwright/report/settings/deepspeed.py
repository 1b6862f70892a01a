"""DeepSpeed: ds_config.json, and a list of what the user's script must do (the pipeline module).

train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x replicas

With a pipeline, gradient_accumulation_steps is the number of microbatches of a pipeline. Ops are split by AutoTP
(tensor_parallel.autotp_size); in stages, by the layers of the script. Names and meanings: DeepSpeed 0.19.8,
deepspeed/runtime/config.py, runtime/zero/config.py, runtime/tensor_parallel/config.py, runtime/pipe/module.py
(partition_method, checkpointable_layers), runtime/pipe/topology.py (order of the ranks), runtime/pipe/engine.py (no
ZeRO 2 and 3), runtime/engine.py (allreduce_gradients; overlap of a pipeline; get_data_types: with bf16, gradients are
summed and reduced in two bytes), runtime/bf16_optimizer.py (states sharded among replicas).
"""

from __future__ import annotations

import json
from typing import Any

from meshwright.report.settings.plan_facts import RegularPlan, describe_stages
from meshwright.report.settings.settings import (
    Settings,
    Unsaid,
    describe_axes,
    refuse_offload,
    refuse_split_experts,
    unsaid_early_stop,
    unsaid_experts,
    unsaid_products,
)
from meshwright.spec import Offload, PlanError

SYSTEM, VERSION = "DeepSpeed", "0.19.8"
# The path of DeepSpeed's own examples for states on drives.
NVME_PATH = "/local_nvme"


def export_deepspeed(facts: RegularPlan) -> Settings:
    """Return the configuration of DeepSpeed for the plan. Raises PlanError if DeepSpeed cannot run the plan at all."""
    plan = facts.plan
    precision, numbers = plan.workload.precision, plan.workload.numbers
    if precision == "float64":
        raise PlanError(
            "DeepSpeed trains in float32, float16 or bfloat16, not in float64. Plan with another precision."
        )
    _refuse(facts)
    values: dict[str, Any] = {
        "train_batch_size": plan.workload.global_batch,
        "train_micro_batch_size_per_gpu": plan.microbatch_size,
        "gradient_accumulation_steps": facts.microbatches_per_replica,
        "optimizer": _optimizer(facts),
        "bf16": {"enabled": numbers.values == "bfloat16"},
        "zero_optimization": _zero(facts),
    }
    if facts.zero and plan.workload.optimizer.kind != "adamw":
        # Of the plans' optimizers DeepSpeed has tested only AdamW, and refuses others unless this key is set.
        values["zero_allow_untested_optimizer"] = True
    if uses_autotp(facts):
        # AutoTP's devices count as replicas here, and a total that disagrees is an error.
        del values["train_batch_size"]
        values["tensor_parallel"] = {"autotp_size": plan.sharding.tensor}
    if facts.num_stages > 1 and facts.again.is_full:
        values["pipeline"] = {"activation_checkpoint_interval": 1}
    if plan.offload.activations == "host":
        # Settings of what runs under deepspeed.checkpointing (runtime/activation_checkpointing/checkpointing.py).
        values["activation_checkpointing"] = {"cpu_checkpointing": True}
    if numbers.values == "float16":
        values["fp16"] = {"enabled": True}
    if numbers.values == "bfloat16":
        # Without ZeRO it takes bf16 alone (engine.py, _do_optimizer_sanity_check).
        values["data_types"] = {"grad_accum_dtype": "fp32" if facts.zero and numbers.gradients == "float32" else "bf16"}
    return Settings(
        system=SYSTEM,
        version=VERSION,
        file_name="ds_config.json",
        values=values,
        text=json.dumps(values, indent=2) + "\n",
        start=f"deepspeed your_script.py --deepspeed_config ds_config.json   (world size {plan.num_devices})",
        fill_in=_fill_in(facts),
        unsaid=_unsaid(facts),
        has_comments=False,
    )


def _refuse(facts: RegularPlan) -> None:
    """Raise PlanError for what neither a key nor the usual script of DeepSpeed can express."""
    sharding = facts.plan.sharding
    if sharding.context > 1:
        raise PlanError(
            "DeepSpeed splits sequences by exchanging heads of attention (Ulysses), and has no rings of keys and "
            "values. Plan without --context; --as megatron and --as torchtitan support it."
        )
    if uses_autotp(facts) and sharding.sequence_parallel:
        raise PlanError(
            "DeepSpeed's AutoTP keeps tokens whole between split products. Plan without --sequence-parallel; --as "
            "megatron and --as torchtitan support it."
        )
    if facts.is_hybrid and facts.zero < 3:
        raise PlanError(
            f"The plan shards states in groups of {facts.shard_size} replicas (ZeRO {facts.zero}); DeepSpeed does so "
            "by MiCS, with ZeRO 3 only. Plan with --zero 3, or without --shard."
        )
    offload = facts.plan.offload
    if offload.optimizer != "device" and (facts.num_stages > 1 or not facts.zero):
        refuse_offload(facts.plan, SYSTEM, "offloads with ZeRO 1 to 3 in one stage")
    if offload.optimizer == "nvme" and facts.zero < 3:
        refuse_offload(facts.plan, SYSTEM, "keeps states on NVMe with ZeRO 3 only")
    if offload.activations == "host" and not facts.again.is_full:
        knows = "keeps inputs of recomputed blocks there (cpu_checkpointing; --recompute full)"
        refuse_offload(facts.plan, SYSTEM, knows)
    refuse_split_experts(facts, SYSTEM)
    if sharding.expert > 1 and (facts.num_stages > 1 or facts.zero == 3):
        what = "in a pipeline" if facts.num_stages > 1 else "under ZeRO 3"
        raise PlanError(
            f"The plan has expert parallelism {what}, which DeepSpeed does not support. Plan with one stage and --zero "
            "0 to 2, or write the settings with --as torchtitan."
        )
    if facts.num_stages > 1 and facts.zero >= 2:
        raise PlanError(
            f"The plan shards gradients (ZeRO {facts.zero}) in {facts.num_stages} pipeline stages; DeepSpeed's "
            "pipeline does not support ZeRO 2 and 3. Plan with --zero 1, or --stages 1."
        )


def uses_autotp(facts: RegularPlan) -> bool:
    """Return whether AutoTP, a key of the configuration, splits ops; in a pipeline, the script's layers split them."""
    return facts.plan.sharding.tensor > 1 and facts.num_stages == 1


def _zero(facts: RegularPlan) -> dict[str, Any]:
    exchange = facts.plan.exchange
    if facts.zero == 0:
        return {"stage": 0}
    away = _offload(facts.plan.offload)
    if facts.zero >= 2:
        groups = {"mics_shard_size": facts.shard_size} if facts.is_hybrid else {}
        return {"stage": facts.zero, "overlap_comm": True, **groups, **away}
    overlap = {"overlap_comm": exchange.overlap} if facts.num_stages == 1 else {}
    return {"stage": 1, "reduce_bucket_size": facts.bucket_elements, **overlap, **away}


def _offload(offload: Offload) -> dict[str, Any]:
    """ZeRO-Offload and ZeRO-Infinity (deepspeed/runtime/zero/offload_config.py)."""
    away: dict[str, Any] = {}
    if offload.optimizer == "host":
        away["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if offload.optimizer == "nvme":
        pipelined = {"pipeline_read": True, "pipeline_write": True}
        away["offload_optimizer"] = {"device": "nvme", "nvme_path": NVME_PATH, "pin_memory": True, **pipelined}
    if offload.parameters == "host":
        away["offload_param"] = {"device": "cpu", "pin_memory": True}
    return away


def _optimizer(facts: RegularPlan) -> dict[str, Any]:
    optimizer = facts.plan.workload.optimizer
    if optimizer.kind == "adamw":
        return {"type": "AdamW", "params": {}}
    return {"type": "SGD", "params": {"momentum": 0.9} if optimizer.momentum else {}}


def _fill_in(facts: RegularPlan) -> tuple[str, ...]:
    items = ["the learning rate: optimizer.params.lr"]
    if facts.is_hybrid:
        items.append("in the script: deepspeed.zero.MiCS_Init around the making of the model")
    if facts.plan.offload.optimizer == "nvme":
        items.append(f"the folder of a drive, in place of {NVME_PATH}: zero_optimization.offload_optimizer.nvme_path")
    if facts.num_stages > 1:
        items += _fill_in_pipeline(facts)
    elif facts.again.kind != "nothing":
        items.append(f"in the script: deepspeed.checkpointing.checkpoint around {facts.again.describe()}")
    if facts.plan.sharding.expert > 1:
        items.append(
            f"in the script: deepspeed.moe.layer.MoE(..., ep_size={facts.plan.sharding.expert}, drop_tokens=False) for "
            "the experts of every layer; no key of the configuration lays them out"
        )
    if uses_autotp(facts):
        items.append(
            "a model that AutoTP knows how to split, of transformers or by tensor_parallel.partition_config; the same "
            f"samples on all {facts.plan.sharding.tensor} devices of a replica"
        )
    return tuple(items)


def _fill_in_pipeline(facts: RegularPlan) -> list[str]:
    sharding = facts.plan.sharding
    method = "'uniform'" if is_uniform(facts) else "..."
    mesh = f"num_stages={facts.num_stages}"
    if sharding.tensor > 1:
        mesh = (
            f"topology=PipeModelDataParallelTopology(num_pp={facts.num_stages}, num_mp={sharding.tensor}, "
            f"num_dp={facts.num_replicas})"
        )
    again = ", checkpointable_layers=[name of the block's class]" if facts.again.is_full else ""
    items = [
        f"in the script: PipelineModule(layers, {mesh}, partition_method={method}{again}) with the "
        f"{facts.plan.stages[-1].stop} layers of `meshwright show` as its list; no key of the configuration makes a "
        "pipeline"
    ]
    if sharding.tensor > 1:
        items.append(
            f"layers that split their ops over the ranks of the model axis: {describe_axes(sharding)}; no key of the "
            "configuration splits those of a pipeline"
        )
    if facts.again.kind != "nothing" and not facts.again.is_full:
        items.append(f"in the layers: deepspeed.checkpointing.checkpoint around {facts.again.describe()}")
    return items


def is_uniform(facts: RegularPlan) -> bool:
    """Return whether the cut is that of ``partition_method='uniform'``.

    That method gives stages equal numbers of layers; if there is a remainder, the first stages have one layer more.
    """
    num_layers, count = facts.plan.stages[-1].stop, facts.num_stages
    sizes = [num_layers // count + (i < num_layers % count) for i in range(count)]
    return [stage.stop - stage.start for stage in facts.plan.stages] == sizes


def _unsaid(facts: RegularPlan) -> tuple[Unsaid, ...]:
    plan, items = facts.plan, []
    if facts.num_stages > 1:
        if not is_uniform(facts):
            items.append(
                Unsaid(
                    what=f"the cut {describe_stages(facts)}",
                    reason="PipelineModule cuts by 'uniform', 'parameters' or 'type:regex', not at given layers",
                )
            )
        if plan.schedule != "1f1b":
            items.append(Unsaid(what=f"schedule {plan.schedule}", reason="DeepSpeed's pipeline runs 1F1B only"))
    if facts.rank_order != "stage-major":
        items.append(Unsaid(what="order of the ranks", reason="replicas of a stage are neighbours in DeepSpeed"))
    items += _unsaid_split(facts)
    if facts.num_with_samples > 1 and facts.zero == 0:
        overlap = ", overlapping with backward" if plan.exchange.overlap else ""
        items.append(
            Unsaid(
                what=f"gradient buckets of {plan.exchange.bucket_bytes:,} bytes{overlap}",
                reason="without ZeRO gradients are reduced after backward in buckets of a fixed 500,000,000 elements",
            )
        )
    if plan.offload.activations == "host":
        items.append(
            Unsaid(
                what="activations that are copied while the device computes, and those outside of blocks",
                reason="DeepSpeed computes on when a block's inputs are copied, and copies nothing else",
            )
        )
    is_copied = facts.num_stages > 1 and facts.num_with_samples > 1 and facts.zero == 0
    if autocast := plan.workload.numbers.autocast:
        items.append(Unsaid(what=f"autocast to {autocast}", reason="the script enters torch.autocast"))
    numbers = plan.workload.numbers
    if numbers.values == "bfloat16" and numbers.gradients == "float32" and not facts.zero:
        items.append(Unsaid(what="gradients in float32", reason="without ZeRO DeepSpeed keeps them in bfloat16"))
    if plan.workload.precision == "bfloat16":
        items.append(
            Unsaid(
                what="states in bfloat16, no master weights",
                reason="DeepSpeed keeps states and master weights in float32, besides the bfloat16 weights",
            )
        )
    if plan.workload.numbers.values == "bfloat16" and is_copied:
        items.append(
            Unsaid(
                what="master weights and optimizer states whole on every replica",
                reason="in a pipeline of bfloat16 DeepSpeed shards them among the replicas, which takes less memory",
            )
        )
    items += unsaid_products(facts)
    return tuple(items)


def _unsaid_split(facts: RegularPlan) -> list[Unsaid]:
    plan, items = facts.plan, []
    if facts.zero:
        items += unsaid_experts(facts, SYSTEM, "shards its states among these ranks, too: less memory")
    if facts.zero == 1 and facts.num_stages > 1 and plan.exchange.overlap:
        items.append(Unsaid(what="sums that overlap with backward", reason="DeepSpeed's pipeline sums after it"))
    if facts.zero >= 2:
        way = (
            "keeps parameters whole and gathers them once per step"
            if facts.zero == 2
            else "gathers module by module, ahead by stage3_prefetch_bucket_size elements"
        )
        items.append(
            Unsaid(
                what="parameters gathered and gradients scattered block by block",
                reason=f"DeepSpeed {way}, and scatters gradients in buckets of reduce_bucket_size elements",
            )
        )
    if uses_autotp(facts):
        items += [
            Unsaid(
                what=f"a total of {plan.workload.global_batch} samples",
                reason="with AutoTP DeepSpeed counts every device as a replica in train_batch_size, which is left out",
            ),
            Unsaid(
                what="an embedding and a loss that are split over the vocabulary",
                reason="AutoTP splits the products of blocks, and others only where the model's own plan says so",
            ),
        ]
    if facts.again.kind == "layers":
        items.append(unsaid_early_stop(SYSTEM))
    return items
