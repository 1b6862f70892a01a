"""Megatron-LM: command-line arguments as a bash array.

    --pipeline-model-parallel-size    stages           --micro-batch-size     samples of a microbatch
    --global-batch-size               samples a step   --pipeline-model-parallel-layout   the cut, if it is uneven
    --tensor-model-parallel-size, --sequence-parallel, --context-parallel-size            axes of the split
    --expert-model-parallel-size      ranks that divide the experts, among those with their own samples
    --use-distributed-optimizer       ZeRO 1           --data-parallel-sharding-strategy  ZeRO 2 and 3, by Megatron-FSDP
    --recompute-granularity           recompute        --recompute-num-layers             recomputed blocks per stage

The number of replicas follows from the world size. Names and meanings: Megatron-LM, megatron/training/arguments.py of
the release with megatron-core 0.16; rank orders: megatron/core/parallel_state.py (order "tp-cp-ep-dp-pp"); what goes
with Megatron-FSDP: its user guide, docs.nvidia.com/megatron-core/developer-guide.
"""

from __future__ import annotations

import shlex
from typing import Any

from meshwright.report.settings.plan_facts import RegularPlan, StageParts, require_blocks, require_transformer
from meshwright.report.settings.settings import (
    Settings,
    Unsaid,
    comment,
    leading_blocks,
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

SYSTEM, VERSION = "Megatron-LM", "core 0.16"
COMM_TYPES = {"ring": "p2p", "all_gather": "all_gather"}
SHARDING_STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}


def export_megatron(facts: RegularPlan) -> Settings:
    """Return the arguments of Megatron-LM for the plan. Raises PlanError if Megatron-LM cannot run the plan at all."""
    plan = facts.plan
    if plan.workload.precision == "float64" or plan.workload.numbers.autocast:
        raise PlanError(
            f"Megatron-LM computes in float32, float16 or bfloat16 throughout, not in {plan.workload.precision}. Plan "
            "with --precision mixed or float32."
        )
    require_transformer(facts, SYSTEM)
    require_even_tokens(facts, SYSTEM)
    require_adam(facts, SYSTEM)
    refuse_split_experts(facts, SYSTEM)
    values: dict[str, Any] = _axes(facts)
    if facts.num_stages > 1 and (layout := _layout(require_blocks(facts, SYSTEM))) is not None:
        values["--pipeline-model-parallel-layout"] = layout
    if facts.rank_order == "replica-major":
        values["--use-tp-pp-dp-mapping"] = True
    values |= {"--micro-batch-size": plan.microbatch_size, "--global-batch-size": plan.workload.global_batch}
    values |= _precision_and_optimizer(facts)
    values |= _exchange(facts)
    if (again := recompute_words(facts, SYSTEM)) is not None:
        values |= {f"--recompute-{name}": value for name, value in again.items()}
    values |= _activations(facts)
    values |= _sizes(facts)
    fill_in = _fill_in(facts)
    unsaid = _unsaid(facts)
    start = (
        f"source megatron_args.sh; torchrun --nproc-per-node ... pretrain_gpt.py "
        f'"${{MEGATRON_ARGS[@]}}" ...   (world size {plan.num_devices})'
    )
    text = comment([f"{SYSTEM} ({VERSION}): {plan.model}", *notes(start, fill_in, unsaid)])
    text += "MEGATRON_ARGS=(\n" + "".join(f"  {line}\n" for line in _lines(values)) + ")\n"
    return Settings(
        system=SYSTEM,
        version=VERSION,
        file_name="megatron_args.sh",
        values=values,
        text=text,
        start=start,
        fill_in=fill_in,
        unsaid=unsaid,
    )


def _axes(facts: RegularPlan) -> dict[str, Any]:
    sharding = facts.plan.sharding
    values: dict[str, Any] = {
        "--tensor-model-parallel-size": sharding.tensor,
        "--pipeline-model-parallel-size": facts.num_stages,
    }
    if sharding.sequence_parallel:
        values["--sequence-parallel"] = True
    if sharding.expert > 1:
        values |= {
            "--expert-model-parallel-size": sharding.expert,
            "--moe-token-dispatcher-type": "alltoall",
            "--moe-grouped-gemm": True,
        }
    if sharding.context > 1:
        values |= {
            "--context-parallel-size": sharding.context,
            "--cp-comm-type": COMM_TYPES[sharding.context_method],
        }
    return values


def _exchange(facts: RegularPlan) -> dict[str, Any]:
    """Gradient reduction, and what replicas shard. Raises PlanError for ZeRO 2 and 3 in a pipeline."""
    exchange, offload = facts.plan.exchange, facts.plan.offload
    if offload.optimizer == "nvme" or offload.parameters == "host" or (offload.optimizer == "host" and facts.zero != 1):
        refuse_offload(facts.plan, SYSTEM, "keeps states on the host with its distributed optimizer (ZeRO 1)")
    if facts.zero >= 2:
        if facts.plan.sharding.expert > 1:
            raise PlanError(
                f"The plan shards gradients by ZeRO {facts.zero} and spreads experts over ranks; Megatron-FSDP shards "
                f"those of experts and of other layers over other ranks than the plan. Plan with --zero 1, or 0."
            )
        if facts.num_stages > 1:
            raise PlanError(
                f"The plan shards gradients by ZeRO {facts.zero} in {facts.num_stages} stages; Megatron-FSDP is "
                "documented with the tensor and context axes, not with pipelines. Plan with --zero 1, or --stages 1."
            )
        hybrid = {}
        if facts.is_hybrid:
            hybrid = {
                "--num-distributed-optimizer-instances": facts.num_groups,
                "--outer-dp-sharding-strategy": "no_shard",
            }
        # The first five go together, says the user guide; the others let exchanges overlap, as the plan's do.
        return hybrid | {
            "--use-megatron-fsdp": True,
            "--data-parallel-sharding-strategy": SHARDING_STRATEGIES[facts.zero],
            "--no-gradient-accumulation-fusion": True,
            "--use-distributed-optimizer": True,
            "--ckpt-format": "fsdp_dtensor",
            "--overlap-grad-reduce": True,
            "--overlap-param-gather": True,
        }
    values: dict[str, Any] = {}
    if facts.num_with_samples > 1 and exchange.overlap:
        values |= {"--overlap-grad-reduce": True, "--ddp-bucket-size": facts.bucket_elements}
    if facts.zero == 1:
        values["--use-distributed-optimizer"] = True
    if facts.is_hybrid:
        values["--num-distributed-optimizer-instances"] = facts.num_groups
    if offload.optimizer == "host":
        # The first needs the second (megatron/training/arguments.py); the third copies during steps, as the plan does.
        values |= {
            "--optimizer-cpu-offload": True,
            "--use-precision-aware-optimizer": True,
            "--overlap-cpu-optimizer-d2h-h2d": True,
        }
    return values


def _activations(facts: RegularPlan) -> dict[str, Any]:
    """Activations on the host, as Transformer Engine copies them (megatron/core/transformer/transformer_config.py)."""
    if facts.plan.offload.activations == "device":
        return {}
    (blocks, *others) = require_blocks(facts, SYSTEM)
    if others or facts.again.kind != "nothing" or blocks.num_blocks < 2:
        knows = "copies activations in one stage of several blocks, without recompute"
        refuse_offload(facts.plan, SYSTEM, knows)
    # At least one block must stay on the device.
    return {"--cpu-offloading-num-layers": blocks.num_blocks - 1}


def require_adam(facts: RegularPlan, system: str) -> None:
    """Raise PlanError for sharded states of an optimizer other than Adam (core/optimizer/distrib_optimizer.py)."""
    optimizer = facts.plan.workload.optimizer
    if facts.zero and optimizer.kind != "adamw":
        raise PlanError(
            f"The plan shards states by ZeRO {facts.zero}; {system} can do so for Adam only, and the plan is for "
            f"{optimizer.name}. Plan with --optimizer adamw, or --zero 0."
        )


def recompute_words(facts: RegularPlan, system: str) -> dict[str, Any] | None:
    """Return Megatron-LM's recompute settings: granularity, method and num-layers; None if nothing is recomputed.

    Raises PlanError for choices that Megatron-LM cannot express.
    """
    again = facts.again
    if again.kind == "nothing":
        return None
    if again.kind == "attention":
        return {"granularity": "selective"}
    if again.is_full:
        return {"granularity": "full", "method": "uniform", "num-layers": 1}
    count = leading_blocks(facts)
    if count is None:
        raise PlanError(
            f"The plan recomputes {again.describe()}; {system} can recompute every block, the same number of first "
            f"blocks in every stage, or attention. Plan with --recompute full or attention, or name such layers."
        )
    return {"granularity": "full", "method": "block", "num-layers": count}


def _layout(stages: tuple[StageParts, ...]) -> str | None:
    """The cut as ``Et*3|t*2L``; None if Megatron's even cut is the same."""
    is_even = len({stage.num_blocks for stage in stages}) == 1
    if is_even and stages[0].num_blocks and stages[0].has_entry and stages[-1].has_exit:
        return None
    return "|".join(
        ("E" if stage.has_entry else "")
        + (f"t*{stage.num_blocks}" if stage.num_blocks > 1 else "t" * stage.num_blocks)
        + ("L" if stage.has_exit else "")
        for stage in stages
    )


def _precision_and_optimizer(facts: RegularPlan) -> dict[str, Any]:
    workload = facts.plan.workload
    flags = {"bfloat16": "--bf16", "float16": "--fp16"}
    values: dict[str, Any] = {flags[workload.numbers.values]: True} if workload.numbers.values in flags else {}
    if workload.numbers.gradients == "bfloat16":
        values["--grad-reduce-in-bf16"] = True
    if workload.precision == "float8":
        values |= {"--fp8-format": "e4m3", "--fp8-recipe": "tensorwise"}
    if workload.optimizer.kind == "adamw":
        return values | {"--optimizer": "adam"}
    return values | {"--optimizer": "sgd", "--sgd-momentum": 0.9 if workload.optimizer.momentum else 0.0}


def _sizes(facts: RegularPlan) -> dict[str, Any]:
    shape = facts.shape
    if shape is None:
        return {} if facts.num_blocks is None else {"--num-layers": facts.num_blocks}
    values = {
        "--num-layers": shape["num_layers"],
        "--hidden-size": shape["width"],
        "--num-attention-heads": shape["num_heads"],
        "--seq-length": shape["sequence_length"],
        "--max-position-embeddings": shape["context"],
        "--vocab-size": shape["vocabulary"],
        # Otherwise the vocabulary is padded, and the embedding differs from the plan's.
        "--make-vocab-size-divisible-by": 1,
    }
    if facts.family == "gpt":
        dropout = shape.get("dropout", 0.0)
        return values | {"--hidden-dropout": dropout, "--attention-dropout": dropout}
    return values | {
        "--ffn-hidden-size": shape["hidden_width"],
        "--group-query-attention": True,
        "--num-query-groups": shape["num_key_value_heads"],
        "--position-embedding-type": "rope",
        "--rotary-base": int(shape["rope_base"]),
        "--normalization": "RMSNorm",
        "--norm-epsilon": shape.get("norm_epsilon", 1e-5),
        "--swiglu": True,
        "--disable-bias-linear": True,
        "--untie-embeddings-and-output-weights": True,
        "--hidden-dropout": 0.0,
        "--attention-dropout": 0.0,
    }


def _fill_in(facts: RegularPlan) -> tuple[str, ...]:
    items = ["data, tokenizer, --lr and --train-iters"]
    if facts.zero >= 2:
        items.append("the environment: CUDA_DEVICE_MAX_CONNECTIONS unset, as Megatron-FSDP asks for")
    elif facts.plan.sharding.width > 1:
        items.append("the environment: CUDA_DEVICE_MAX_CONNECTIONS=1, required on GPUs before Blackwell")
    if facts.plan.sharding.expert > 1:
        items.append("the experts of the model: --num-experts, --moe-router-topk, --moe-ffn-hidden-size and its router")
    if facts.shape is None:
        items.append(
            "the model: a transformer that Megatron-LM builds, by its sizes (--hidden-size, --num-attention-heads, "
            f"--seq-length, --max-position-embeddings, ...); those of {facts.plan.model!r} are not known here"
        )
    return tuple(items)


def _unsaid(facts: RegularPlan) -> tuple[Unsaid, ...]:
    plan, items = facts.plan, []
    if facts.num_stages > 1 and plan.schedule != "1f1b":
        items.append(Unsaid(what=f"schedule {plan.schedule}", reason="Megatron-LM flushes with 1F1B only"))
    if facts.rank_order == "other":
        items.append(Unsaid(what="order of the ranks", reason="replicas of a stage, or of a pipeline, are neighbours"))
    items += unsaid_split(facts)
    if plan.offload.activations == "host":
        reason = "Transformer Engine copies those of all blocks but one at least, and of nothing else"
        items.append(Unsaid(what="activations of the last block and outside of blocks on the host", reason=reason))
    if facts.zero == 2:
        items.append(
            Unsaid(
                what="parameters gathered during every forward",
                reason="with optim_grads Megatron-FSDP keeps them whole and gathers them once per step",
            )
        )
    if facts.num_with_samples > 1 and facts.zero < 2 and not plan.exchange.overlap:
        items.append(
            Unsaid(
                what=f"gradient buckets of {plan.exchange.bucket_bytes:,} bytes after backward",
                reason="without --overlap-grad-reduce all gradients are reduced at once",
            )
        )
    if plan.workload.precision == "bfloat16":
        items.append(
            Unsaid(
                what="states in bfloat16, no master weights",
                reason="Megatron-LM keeps states and master weights in float32, besides the bfloat16 weights",
            )
        )
    if plan.workload.precision == "float8":
        items.append(Unsaid(what="factors kept in bfloat16", reason="Transformer Engine keeps them in float8"))
    else:
        items += unsaid_products(facts)
    if facts.is_cpu:
        items.append(Unsaid(what=f"devices of {plan.cluster}", reason="Megatron-LM trains on GPUs"))
    return tuple(items)


def unsaid_split(facts: RegularPlan) -> list[Unsaid]:
    """Return what Megatron-LM does differently if ops are split, states are sharded or blocks are recomputed."""
    sharding, shape = facts.plan.sharding, facts.shape
    items = unsaid_states_of_context(facts, "Megatron-LM")
    if facts.zero == 1:
        items += unsaid_experts(facts, "Megatron-LM", "shards its states among these ranks, too: less memory")
    if sharding.sequence_parallel and not sharding.regather:
        items.append(
            Unsaid(
                what="inputs of split products kept whole",
                reason="Megatron-LM keeps them split and gathers them again in backward: less memory, more traffic",
            )
        )
    if shape is not None and (rest := shape["vocabulary"] % sharding.tensor):
        items.append(
            Unsaid(
                what=f"a vocabulary of {shape['vocabulary']:,} in unequal parts",
                reason=f"Megatron-LM pads it to {shape['vocabulary'] + sharding.tensor - rest:,}",
            )
        )
    if facts.again.kind == "layers":
        items.append(unsaid_early_stop("Megatron-LM"))
    return items


def _lines(values: dict[str, Any]) -> list[str]:
    return [name if value is True else f"{name} {shlex.quote(str(value))}" for name, value in values.items()]
