"""accelerate: a configuration file for ``accelerate launch --config_file``.

One stage is plain data parallelism (MULTI_GPU, MULTI_CPU, or NO for one rank). A pipeline is only to be had through its
Megatron-LM plugin. Names and meanings: accelerate 1.15, accelerate/commands/config/config_args.py (ClusterConfig) and
the arguments of ``accelerate launch``; models with a plugin: accelerate/utils/dataclasses.py (MegatronLMPlugin).
"""

from __future__ import annotations

import json
from typing import Any

from meshwright.report.settings.facts import Facts, StageParts, describe_stages, require_blocks, require_transformer
from meshwright.report.settings.launch import DEFAULT_PORT
from meshwright.report.settings.settings import Settings, Unsaid, comment, notes
from meshwright.spec import PlanError

SYSTEM, VERSION = "accelerate", "1.15"


def export_accelerate(facts: Facts) -> Settings:
    """The configuration for the plan. Raises PlanError where accelerate cannot run it at all."""
    plan = facts.plan
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _distributed_type(facts),
        "mixed_precision": "bf16" if plan.workload.precision == "bfloat16" else "no",
        "use_cpu": facts.is_cpu,
        "debug": False,
        "num_processes": plan.num_ranks,
        "num_machines": facts.num_nodes,
        "machine_rank": 0,
        "rdzv_backend": "static",
        "same_network": True,
        "main_training_function": "main",
    }
    if facts.num_nodes > 1:
        values |= {"main_process_ip": "NODE0", "main_process_port": DEFAULT_PORT}
    if facts.num_stages > 1:
        values["megatron_lm_config"] = _pipeline(facts)
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


def _distributed_type(facts: Facts) -> str:
    if facts.num_stages > 1:
        if facts.is_cpu:
            raise PlanError(
                "accelerate makes pipelines only through Megatron-LM, which trains on GPUs; this plan of "
                f"{facts.num_stages} stages is for {facts.plan.cluster!r}. A plan of one stage can be expressed "
                "(`meshwright plan --stages 1`)."
            )
        return "MEGATRON_LM"
    if facts.plan.num_ranks == 1:
        return "NO"
    return "MULTI_CPU" if facts.is_cpu else "MULTI_GPU"


def _pipeline(facts: Facts) -> dict[str, Any]:
    require_transformer(facts, "Megatron-LM, through which accelerate makes pipelines,")
    stages = require_blocks(facts, "accelerate, through Megatron-LM,")
    values: dict[str, Any] = {
        "megatron_lm_tp_degree": 1,
        "megatron_lm_pp_degree": facts.num_stages,
        "megatron_lm_num_micro_batches": facts.microbatches_per_replica,
        "megatron_lm_sequence_parallelism": False,
        "megatron_lm_recompute_activations": False,
        "megatron_lm_use_distributed_optimizer": False,
    }
    if not facts.is_even and _last_stage_differs_alone(stages):
        values["megatron_lm_decoder_last_pipeline_num_layers"] = stages[-1].num_blocks
    return values


def _last_stage_differs_alone(stages: tuple[StageParts, ...]) -> bool:
    return len({stage.num_blocks for stage in stages[:-1]}) == 1 and all(stage.num_blocks for stage in stages)


def _fill_in(facts: Facts) -> tuple[str, ...]:
    items = []
    if facts.num_nodes > 1:
        items.append("main_process_ip: name or address of node 0; machine_rank: 0, 1, ... on the nodes")
    count = facts.microbatches_per_replica
    if facts.num_stages == 1 and count > 1:
        items.append(f"in the script: Accelerator(gradient_accumulation_steps={count})")
    items.append(f"in the script: batches of {facts.plan.microbatch_size} per process, the optimizer, the model")
    if facts.num_stages > 1:
        items.append("a model of transformers that the plugin knows (gpt2, llama, megatron-bert, t5)")
    return tuple(items)


def _unsaid(facts: Facts) -> tuple[Unsaid, ...]:
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
    if facts.num_stages > 1 and facts.rank_order != "stage-major":
        items.append(Unsaid(what="order of the ranks", reason="replicas of a stage are neighbours"))
    if facts.num_replicas > 1:
        items.append(_unsaid_exchange(facts))
    items += [
        Unsaid(
            what="the global batch", reason=f"it is what the script loads, {plan.workload.global_batch} in the plan"
        ),
        Unsaid(what=f"optimizer {plan.workload.optimizer.name}", reason="it is made in the script"),
    ]
    if plan.workload.precision == "bfloat16":
        items.append(
            Unsaid(
                what="parameters and gradients of two bytes",
                reason="autocast keeps both in float32"
                if facts.num_stages == 1
                else "Megatron-LM sums gradients in float32",
            )
        )
    if plan.workload.precision == "float64":
        items.append(Unsaid(what="float64", reason="it is the dtype of the model in the script"))
    return tuple(items)


def _unsaid_exchange(facts: Facts) -> Unsaid:
    exchange = facts.plan.exchange
    what = f"gradient buckets of {exchange.bucket_bytes:,} bytes" + ("" if exchange.overlap else " after backward")
    if facts.num_stages > 1:
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
