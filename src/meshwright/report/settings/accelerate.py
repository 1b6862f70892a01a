"""accelerate: a configuration file for ``accelerate launch --config_file``.

    plain       one stage of whole ops: MULTI_GPU, MULTI_CPU, or NO for one process
    FSDP        one stage under ZeRO 2 and 3, by FSDP2; with a parallelism_config if ops are split
    Megatron    everything else: pipelines, split ops, ZeRO 1, available only through the Megatron-LM plugin

Names and meanings: accelerate 1.15, accelerate/commands/config/config_args.py (ClusterConfig) and the arguments of
``accelerate launch``; models with a plugin, and its defaults: accelerate/utils/dataclasses.py (MegatronLMPlugin);
meshes: accelerate/parallelism_config.py.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from meshwright.report.settings.launch_scripts import DEFAULT_PORT
from meshwright.report.settings.megatron import recompute_words, require_adam, unsaid_split
from meshwright.report.settings.plan_facts import (
    RegularPlan,
    StageParts,
    describe_stages,
    require_blocks,
    require_transformer,
)
from meshwright.report.settings.settings import (
    Settings,
    Unsaid,
    comment,
    moves_all,
    notes,
    refuse_offload,
    require_even_tokens,
    unsaid_products,
    unsaid_states_of_context,
)
from meshwright.spec import DTYPE_BYTES, PlanError

SYSTEM, VERSION = "accelerate", "1.15"
PLUGIN = "accelerate, through Megatron-LM,"
# accelerate's words for precisions.
_MIXED = {"bfloat16": "bf16", "float16": "fp16"}
COMM_STRATEGIES = {"ring": "alltoall", "all_gather": "allgather"}


def export_accelerate(facts: RegularPlan) -> Settings:
    """Return the configuration of accelerate for the plan. Raises PlanError if accelerate cannot run the plan."""
    plan = facts.plan
    if plan.sharding.expert > 1:
        raise PlanError(
            f"The plan has expert parallelism over {plan.sharding.expert} ranks, for which {SYSTEM} has no setting. "
            "Plan without --expert; --as torchtitan, megatron and deepspeed support it."
        )
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _distributed_type(facts),
        "mixed_precision": _MIXED.get(plan.workload.numbers.compute, "no"),
        "use_cpu": facts.is_cpu,
        "debug": False,
        "num_processes": plan.num_devices,
        "num_machines": facts.num_nodes,
        "machine_rank": 0,
        "rdzv_backend": "static",
        "same_network": True,
        "main_training_function": "main",
    }
    if facts.num_nodes > 1:
        values |= {"main_process_ip": "NODE0", "main_process_port": DEFAULT_PORT}
    way = _way(facts)
    if way == "megatron" and plan.workload.numbers.autocast:
        raise PlanError(
            f"{SYSTEM} runs this plan by Megatron-LM, which has no autocast; the plan has {plan.workload.precision}. "
            "Plan with --precision mixed or float32."
        )
    if way == "megatron":
        values["megatron_lm_config"] = _megatron(facts)
    elif way == "fsdp":
        values |= _fsdp(facts)
    fill_in, unsaid = _fill_in(facts), _unsaid(facts)
    start = "accelerate launch --config_file accelerate.yaml your_script.py"
    return Settings(
        system=SYSTEM,
        version=VERSION,
        file_name="accelerate.yaml",
        values=values,
        text=comment([f"{SYSTEM} {VERSION}: {plan.model}", *notes(start, fill_in, unsaid)]) + _yaml(values),
        start=start,
        fill_in=fill_in,
        unsaid=unsaid,
    )


def _way(facts: RegularPlan) -> Literal["plain", "fsdp", "megatron"]:
    if facts.plan.offload.activations == "host":
        refuse_offload(facts.plan, SYSTEM, "has no setting for activations on the host")
    is_away = facts.plan.offload.optimizer != "device"
    if is_away and not (facts.num_stages == 1 and facts.zero == 3 and moves_all(facts.plan.offload)):
        knows = "keeps parameters and optimizer states on the host together, by FSDP with ZeRO 3 in one stage"
        refuse_offload(facts.plan, SYSTEM, knows)
    if facts.num_stages == 1 and facts.zero >= 2:
        return "fsdp"
    is_plain = facts.num_stages == 1 and facts.zero == 0 and facts.plan.sharding.width == 1
    return "plain" if is_plain else "megatron"


def _distributed_type(facts: RegularPlan) -> str:
    way = _way(facts)
    if way != "plain" and facts.is_cpu:
        what = "pipelines, split ops and sharded states only through Megatron-LM, which trains on GPUs"
        if way == "fsdp":
            what = "sharded gradients only through FSDP, which it starts on GPUs"
        raise PlanError(
            f"accelerate makes {what}; this plan is for {facts.plan.cluster!r}. A plan of one stage of whole ops with "
            "nothing sharded can be expressed (`meshwright plan --stages 1`)."
        )
    if way != "plain":
        return {"fsdp": "FSDP", "megatron": "MEGATRON_LM"}[way]
    if facts.plan.num_ranks == 1:
        return "NO"
    return "MULTI_CPU" if facts.is_cpu else "MULTI_GPU"


def _fsdp(facts: RegularPlan) -> dict[str, Any]:
    sharding = facts.plan.sharding
    if sharding.sequence_parallel:
        raise PlanError(
            "accelerate splits tokens between split products only through Megatron-LM, which has no setting for ZeRO 2 "
            "and 3 there. Plan with --zero 1, or without --sequence-parallel."
        )
    require_even_tokens(facts, SYSTEM)
    values: dict[str, Any] = {
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": facts.zero == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": facts.again.is_full,
            **({"fsdp_offload_params": True} if moves_all(facts.plan.offload) else {}),
        }
    }
    if sharding.width > 1 or facts.is_hybrid:
        values["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": facts.num_groups,
            "parallelism_config_dp_shard_size": facts.shard_size,
            "parallelism_config_tp_size": sharding.tensor,
            "parallelism_config_cp_size": sharding.context,
            "parallelism_config_cp_comm_strategy": COMM_STRATEGIES[sharding.context_method],
        }
    return values


def _megatron(facts: RegularPlan) -> dict[str, Any]:
    require_transformer(facts, "Megatron-LM, through which accelerate makes pipelines, split ops and ZeRO 1,")
    if facts.zero >= 2:
        raise PlanError(
            f"The plan shards gradients (ZeRO {facts.zero}) in {facts.num_stages} pipeline stages; accelerate has FSDP "
            "for one stage, and Megatron-LM's pipelines with ZeRO 1. Plan with --zero 1, or --stages 1."
        )
    if facts.is_hybrid:
        raise PlanError(
            f"The plan shards optimizer states in groups of {facts.shard_size} replicas (ZeRO 1); accelerate's "
            "Megatron-LM plugin shards them among all replicas. Plan without --shard, or with --zero 2 or 3 and "
            "--stages 1."
        )
    require_even_tokens(facts, PLUGIN)
    require_adam(facts, PLUGIN)
    sharding = facts.plan.sharding
    # The plugin's own default of the context axis is 2.
    values: dict[str, Any] = {
        "megatron_lm_tp_degree": sharding.tensor,
        "megatron_lm_pp_degree": facts.num_stages,
        "megatron_lm_context_parallel_size": sharding.context,
        "megatron_lm_num_micro_batches": facts.microbatches_per_replica,
        "megatron_lm_sequence_parallelism": sharding.sequence_parallel,
        "megatron_lm_use_distributed_optimizer": facts.zero == 1,
    }
    again = recompute_words(facts, PLUGIN)
    if again is not None and again["granularity"] == "full":
        values |= {f"megatron_lm_recompute_{name.replace('-', '_')}": value for name, value in again.items()}
    if facts.num_stages > 1:
        stages = require_blocks(facts, PLUGIN)
        if not facts.is_even and _last_stage_differs_alone(stages):
            values["megatron_lm_decoder_last_pipeline_num_layers"] = stages[-1].num_blocks
    return values


def _last_stage_differs_alone(stages: tuple[StageParts, ...]) -> bool:
    return len({stage.num_blocks for stage in stages[:-1]}) == 1 and all(stage.num_blocks for stage in stages)


def _fill_in(facts: RegularPlan) -> tuple[str, ...]:
    items = []
    if facts.num_nodes > 1:
        items.append("main_process_ip: name or address of node 0; machine_rank: 0, 1, ... on the nodes")
    way, count = _way(facts), facts.microbatches_per_replica
    if way != "megatron" and count > 1:
        items.append(f"in the script: Accelerator(gradient_accumulation_steps={count})")
    items.append(f"in the script: batches of {facts.plan.microbatch_size} per process, the optimizer, the model")
    if way == "megatron":
        items += _fill_in_megatron(facts)
    elif facts.again.kind != "nothing" and not (way == "fsdp" and facts.again.is_full):
        items.append(f"in the script: torch.utils.checkpoint around {facts.again.describe()}")
    if way == "fsdp":
        items += _fill_in_fsdp(facts)
    return tuple(items)


def _fill_in_megatron(facts: RegularPlan) -> list[str]:
    items = ["a model of transformers that the plugin knows (gpt2, llama, megatron-bert, t5)"]
    again = recompute_words(facts, PLUGIN)
    if again is None or again["granularity"] == "selective":
        granularity = None if again is None else "selective"
        words = {"recompute_granularity": granularity, "recompute_method": None, "recompute_num_layers": None}
        items.append(
            f"in the script: Accelerator(megatron_lm_plugin=MegatronLMPlugin(other_megatron_args={words})), for the "
            "plugin computes every block again by default, and no value of the file says otherwise"
        )
    if facts.plan.sharding.width > 1:
        items.append("the environment: CUDA_DEVICE_MAX_CONNECTIONS=1, required on GPUs before Blackwell")
    return items


def _fill_in_fsdp(facts: RegularPlan) -> list[str]:
    sharding = facts.plan.sharding
    items = ["fsdp_transformer_layer_cls_to_wrap: the class of a block, for a model that is not of transformers"]
    if sharding.tensor > 1:
        items.append("in the script: from_pretrained(..., tp_plan='auto') on the mesh of the Accelerator")
    if sharding.context > 1:
        items.append("in the script: every forward within accelerator.maybe_context_parallel(...)")
    return items


def _unsaid(facts: RegularPlan) -> tuple[Unsaid, ...]:
    plan, items = facts.plan, []
    if facts.num_stages > 1:
        stages = require_blocks(facts, SYSTEM)
        if not (facts.is_even or _last_stage_differs_alone(stages)) or not (
            stages[0].has_entry and stages[-1].has_exit
        ):
            items.append(
                Unsaid(
                    what=f"the cut {describe_stages(facts)}",
                    reason="only the last stage may have another number of blocks",
                )
            )
        if plan.schedule != "1f1b":
            items.append(Unsaid(what=f"schedule {plan.schedule}", reason="Megatron-LM flushes with 1F1B only"))
    items += _unsaid_split(facts)
    if facts.num_stages > 1 and facts.rank_order != "stage-major":
        items.append(Unsaid(what="order of the ranks", reason="replicas of a stage are neighbours"))
    if facts.num_replicas > 1 and facts.zero < 2:
        items.append(_unsaid_exchange(facts))
    items += [
        Unsaid(
            what="the global batch", reason=f"it is what the script loads, {plan.workload.global_batch} in the plan"
        ),
        Unsaid(what=f"optimizer {plan.workload.optimizer.name}", reason="it is made in the script"),
    ]
    items += _unsaid_precision(facts)
    if plan.workload.precision == "float64":
        items.append(Unsaid(what="float64", reason="it is the dtype of the model in the script"))
    items += unsaid_products(facts)
    return tuple(items)


def _unsaid_precision(facts: RegularPlan) -> list[Unsaid]:
    numbers, way = facts.plan.workload.numbers, _way(facts)
    if DTYPE_BYTES[numbers.values] > 2:
        return []
    items = []
    if way == "megatron" and numbers.gradient_bytes == 2:
        items.append(Unsaid(what="gradients of two bytes", reason="Megatron-LM sums gradients in float32"))
    elif way != "megatron" and not (facts.zero >= 2 and numbers.master):
        items.append(
            Unsaid(what="parameters of two bytes", reason="autocast and FSDP keep parameters and gradients in float32")
        )
    if not numbers.master:
        items.append(Unsaid(what=f"states in {numbers.states}", reason="they are kept in float32"))
    return items


def _unsaid_split(facts: RegularPlan) -> list[Unsaid]:
    sharding, way = facts.plan.sharding, _way(facts)
    if way == "megatron":
        items = unsaid_split(facts)
        if sharding.context > 1 and sharding.context_method == "all_gather":
            items.append(
                Unsaid(what="keys and values gathered", reason="the plugin's Megatron-LM sends them round a ring")
            )
        return items
    if way == "plain":
        return []
    items = unsaid_states_of_context(facts, SYSTEM)
    if sharding.tensor > 1:
        items.append(
            Unsaid(what="which products are split, and how", reason="it is the tp_plan of the model, in transformers")
        )
    return items


def _unsaid_exchange(facts: RegularPlan) -> Unsaid:
    exchange = facts.plan.exchange
    what = f"gradient buckets of {exchange.bucket_bytes:,} bytes" + ("" if exchange.overlap else " after backward")
    if _way(facts) == "megatron":
        return Unsaid(what=what, reason="the plugin has no setting for Megatron-LM's buckets")
    hint = f"DistributedDataParallelKwargs(bucket_cap_mb={max(exchange.bucket_bytes // 2**20, 1)})"
    reason = f"pass {hint} to Accelerator" if exchange.overlap else "DDP always overlaps them with backward"
    return Unsaid(what=what, reason=f"no key of the file; {reason}")


def _yaml(values: dict[str, Any], indent: str = "") -> str:
    """YAML of nested mappings. JSON's scalars are YAML's; a bare ``no`` would be false."""
    lines = []
    for name, value in values.items():
        if isinstance(value, dict):
            lines.append(f"{indent}{name}:\n{_yaml(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{name}: {json.dumps(value)}\n")
    return "".join(lines)
