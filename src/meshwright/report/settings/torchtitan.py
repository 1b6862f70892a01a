"""torchtitan: a Python module with a config function, the form of settings in release 0.3.

    parallelism.pipeline_parallel_degree            stages      parallelism.pipeline_parallel_microbatch_size
    parallelism.data_parallel_replicate_degree      replicas    parallelism.module_fqns_per_model_part   the cut
    training.local_batch_size, global_batch_size    samples of a replica (of one accumulation without stages), of all
    parallelism.data_parallel_shard_degree          replicas that shard by ZeRO 2 or 3 (fsdp_reshard_after_forward)
    parallelism.tensor_parallel_degree, enable_sequence_parallel, context_parallel_degree      axes of the split
    parallelism.expert_parallel_degree              ranks that divide the experts, among those that FSDP2 shards over
    activation_checkpoint                           recompute every block, all of it or all but costly ops; or nothing

Names and meanings: torchtitan 0.3.0, torchtitan/config/configs.py and trainer.py; the mesh's order (stages outermost,
tensor innermost): torchtitan/distributed/parallel_dims.py; units that are gathered: torchtitan/distributed/fsdp.py.
"""

from __future__ import annotations

from typing import Any

from meshwright.report.settings.plan_facts import RegularPlan, StageParts, require_blocks
from meshwright.report.settings.settings import (
    Settings,
    Unsaid,
    comment,
    moves_all,
    notes,
    refuse_offload,
    refuse_split_experts,
    require_even_tokens,
    unsaid_early_stop,
    unsaid_experts,
    unsaid_products,
    unsaid_states_of_context,
)
from meshwright.spec import PlanError

SYSTEM, VERSION = "torchtitan", "0.3.0"
FILE_NAME = "torchtitan_plan.py"
# Models that both sides have: zoo name → config function in torchtitan.models.llama3.config_registry.
SAME_MODELS = {"llama3-8b": "llama3_8b", "llama3-70b": "llama3_70b"}
SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe"}
RESHARD = {2: "never", 3: "always"}
# The classes of its policies by their names there.
POLICIES = {"full": "FullAC", "selective": "SelectiveAC"}


def export_torchtitan(facts: RegularPlan) -> Settings:
    """Return the config module of torchtitan for the plan. Raises PlanError if torchtitan cannot run the plan."""
    plan = facts.plan
    if plan.workload.numbers.values not in ("float32", "bfloat16") or plan.workload.numbers.autocast:
        raise PlanError(
            f"torchtitan trains in float32 or bfloat16, not in {plan.workload.precision}. Plan with --precision mixed."
        )
    if plan.workload.optimizer.kind != "adamw":
        raise PlanError(
            f"torchtitan has Adam, AdamW and Muon, but the plan is for {plan.workload.optimizer.name}. "
            "Plan with --optimizer adamw."
        )
    if facts.zero == 1:
        raise PlanError(
            "The plan shards optimizer states by ZeRO 1; torchtitan's FSDP2 also shards gradients. "
            "Plan with --zero 2, or --zero 0."
        )
    if facts.again.kind not in ("nothing", "op") and not facts.again.is_full:
        raise PlanError(
            f"The plan recomputes {facts.again.describe()}; torchtitan {VERSION} can recompute every block, whole or "
            f"except results of attention and products. Plan with --recompute full, op or none."
        )
    if plan.offload.activations == "host":
        refuse_offload(plan, SYSTEM, "has no setting for activations on the host")
    if plan.offload.optimizer != "device" and not (facts.zero == 3 and moves_all(plan.offload)):
        refuse_offload(plan, SYSTEM, "keeps parameters and optimizer states on the host together, with ZeRO 3")
    require_even_tokens(facts, SYSTEM)
    refuse_split_experts(facts, SYSTEM)
    again = "full" if facts.again.is_full else "selective" if facts.again.kind == "op" else None
    values = {**_parallelism(facts), **_training(facts), "activation_checkpoint": again}
    base = SAME_MODELS.get(plan.model)
    fill_in = _fill_in(facts, base)
    unsaid = _unsaid(facts)
    start = (
        f"PYTHONPATH=. torchrun --nproc-per-node ... -m torchtitan.train --module {FILE_NAME.removesuffix('.py')} "
        f"--config plan   (world size {plan.num_devices})"
    )
    return Settings(
        system=SYSTEM,
        version=VERSION,
        file_name=FILE_NAME,
        values=values,
        text=_module(plan.model, base, values, notes(start, fill_in, unsaid)),
        start=start,
        fill_in=fill_in,
        unsaid=unsaid,
    )


def _parallelism(facts: RegularPlan) -> dict[str, Any]:
    sharding, is_shared = facts.plan.sharding, facts.zero >= 2
    values: dict[str, Any] = {
        "parallelism.data_parallel_replicate_degree": facts.num_groups if is_shared else facts.num_replicas,
        "parallelism.data_parallel_shard_degree": (facts.shard_size if is_shared else 1) * sharding.expert,
        "parallelism.tensor_parallel_degree": sharding.tensor,
        "parallelism.context_parallel_degree": sharding.context,
        "parallelism.pipeline_parallel_degree": facts.num_stages,
    }
    if sharding.tensor > 1:
        values["parallelism.enable_sequence_parallel"] = sharding.sequence_parallel
    if sharding.expert > 1:
        values["parallelism.expert_parallel_degree"] = sharding.expert
    if sharding.context > 1:
        # The load balancer for FlexAttention, which torchtitan's models have by default.
        values["parallelism.context_parallel_load_balancer"] = "ptrr"
    if is_shared or sharding.context > 1 or sharding.expert > 1:
        values["parallelism.fsdp_reshard_after_forward"] = RESHARD.get(facts.zero, "never")
    if facts.num_stages > 1:
        values["parallelism.pipeline_parallel_schedule"] = SCHEDULES.get(facts.plan.schedule, "1F1B")
        values["parallelism.pipeline_parallel_microbatch_size"] = facts.plan.microbatch_size
        values["parallelism.module_fqns_per_model_part"] = _modules(require_blocks(facts, SYSTEM))
        # torchtitan refuses CUDA graphs together with a pipeline.
        values["training.disable_cuda_graphs"] = True
    return values


def _modules(stages: tuple[StageParts, ...]) -> list[list[str]]:
    """Names of the modules of each stage, as torchtitan's decoders call them."""
    return [
        [
            *(["tok_embeddings"] if stage.has_entry else []),
            *(f"layers.{block}" for block in range(stage.first_block, stage.first_block + stage.num_blocks)),
            *(["norm", "lm_head"] if stage.has_exit else []),
        ]
        for stage in stages
    ]


def _training(facts: RegularPlan) -> dict[str, Any]:
    plan = facts.plan
    local = plan.workload.global_batch // facts.num_with_samples if facts.num_stages > 1 else plan.microbatch_size
    values: dict[str, Any] = {
        "training.local_batch_size": local,
        "training.global_batch_size": plan.workload.global_batch,
        "training.dtype": plan.workload.numbers.master or plan.workload.numbers.values,
        "training.mixed_precision_param": plan.workload.numbers.values,
    }
    if moves_all(plan.offload):
        values["training.enable_cpu_offload"] = True
    if facts.shape is not None:
        values["training.seq_len"] = facts.shape["sequence_length"]
    return values


def _fill_in(facts: RegularPlan, base: str | None) -> tuple[str, ...]:
    items = ["tokenizer and data (hf_assets_path, dataloader), training.steps, the learning rate"]
    if base is None:
        items.insert(
            0,
            f"the import of base: torchtitan trains models that are registered with it, and {facts.plan.model!r} is "
            "none of them",
        )
        if facts.num_stages > 1:
            items.insert(1, "module names in module_fqns_per_model_part, if that model's differ from a decoder's")
        if facts.plan.sharding.context > 1:
            items.insert(1, "context_parallel_load_balancer 'headtail', if that model has no FlexAttention")
    return tuple(items)


def _unsaid(facts: RegularPlan) -> tuple[Unsaid, ...]:
    plan, items = facts.plan, []
    if facts.num_stages > 1 and plan.schedule not in SCHEDULES:
        items.append(Unsaid(what=f"schedule {plan.schedule}", reason="torchtitan has no such schedule; 1F1B is set"))
    if facts.rank_order != "stage-major":
        items.append(Unsaid(what="order of the ranks", reason="replicas of a stage are neighbours in torchtitan"))
    items += _unsaid_split(facts)
    if facts.num_with_samples > 1 and facts.zero == 0:
        items.append(
            Unsaid(
                what=f"gradient buckets of {plan.exchange.bucket_bytes:,} bytes"
                + ("" if plan.exchange.overlap else " after backward"),
                reason="torchtitan replicates by FSDP2, which reduces block by block during backward",
            )
        )
    numbers = plan.workload.numbers
    if numbers.master and facts.zero < 2 and facts.plan.sharding.context == facts.plan.sharding.expert == 1:
        how = (
            "without FSDP it trains in float32 where pipelines or products are split"
            if facts.num_stages > 1 or facts.plan.sharding.tensor > 1
            else "without FSDP it keeps weights in float32 and computes under torch.autocast"
        )
        items.append(Unsaid(what="parameters of two bytes", reason=how))
    if numbers.gradient_bytes == 2:
        items.append(Unsaid(what="gradients of two bytes", reason="torchtitan sums them in float32"))
    items += unsaid_products(facts)
    return tuple(items)


def _unsaid_split(facts: RegularPlan) -> list[Unsaid]:
    sharding, items = facts.plan.sharding, []
    if facts.zero:
        items.append(
            Unsaid(
                what="embedding and head gathered together",
                reason="each is a unit of its own in torchtitan, with the last norm at the head",
            )
        )
        items += unsaid_states_of_context(facts, SYSTEM)
    elif sharding.context > 1:
        items.append(
            Unsaid(
                what="parameters and states whole on every rank of the context axis",
                reason="torchtitan always shards them by FSDP2 there: less memory, more traffic",
            )
        )
    items += unsaid_experts(facts, SYSTEM, "shards it by FSDP2 among them: less memory, more traffic")
    if sharding.context > 1 and sharding.context_method == "ring":
        items.append(Unsaid(what="keys and values sent round a ring", reason="torchtitan gathers them"))
    if sharding.regather:
        items.append(
            Unsaid(
                what="inputs of split products gathered again in backward",
                reason="torchtitan keeps them whole: more memory, less traffic",
            )
        )
    if facts.again.kind != "nothing":
        items.append(unsaid_early_stop(SYSTEM))
    return items


def _module(model: str, base: str | None, values: dict[str, Any], lines: list[str]) -> str:
    source = (
        f"torchtitan.models.llama3.config_registry import {base}"
        if base
        else ("your_model.config_registry import your_config")
    )
    policy = POLICIES.get(values["activation_checkpoint"])
    written = {name: repr(value) for name, value in values.items()}
    if policy:
        written["activation_checkpoint"] = f"{policy}.Config()"
    assignments = "".join(f"    config.{name} = {value}\n" for name, value in written.items())
    return (
        comment([f"{SYSTEM} {VERSION}: {model}", *lines])
        + (f"from torchtitan.distributed.activation_checkpoint import {policy}\n" if policy else "")
        + f"from {source} as base\n\n\ndef plan():\n    config = base()\n"
        + assignments
        + "    return config\n"
    )
