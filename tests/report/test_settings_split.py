"""Split plans in the words of other systems: every axis said by its option, listed, or refused; nothing left out."""

import itertools
import math
from dataclasses import fields, replace

import pytest

from meshwright.report.settings import SYSTEMS, export_orders, ranks_per_node
from meshwright.report.settings import settings as split
from meshwright.spec import GradientExchange, Offload, OpPlacement, Optimizer, Plan, PlanError, Sharding, load_cluster
from tests.report.plans import PLANS, SPLITS, plan_of, split_of
from tests.report.test_settings import check_documented, export, export_or_none, flat

DATA, PIPELINE = PLANS["data"], PLANS["pipeline x data"]
WIDE = plan_of([(0, 34)], [range(2)], cluster="2x8xH100")
STAGES = plan_of([(0, 17), (17, 34)], [range(2), range(2, 4)], cluster="2x8xH100")


def experts_of(plan, expert, **options):
    """Each rank of the expert axis has as many samples as the plan."""
    samples = plan.workload.global_batch * expert
    plan = replace(plan, workload=replace(plan.workload, global_batch=samples))
    return split_of(plan, expert=expert, **options)


MEGATRON_FSDP = {
    "--use-megatron-fsdp": True,
    "--no-gradient-accumulation-fusion": True,
    "--use-distributed-optimizer": True,
    "--ckpt-format": "fsdp_dtensor",
}

# Each choice of a split for each system: the settings that say it, or words of the refusal.
SAID = {
    "tensor": {
        "plan": split_of(WIDE, tensor=4),
        "megatron": {"--tensor-model-parallel-size": 4},
        "torchtitan": {"parallelism.tensor_parallel_degree": 4, "parallelism.enable_sequence_parallel": False},
        "deepspeed": {"tensor_parallel.autotp_size": 4},
        "accelerate": {"distributed_type": "MEGATRON_LM", "megatron_lm_config.megatron_lm_tp_degree": 4},
    },
    "sequence parallelism": {
        "plan": split_of(WIDE, tensor=4, sequence_parallel=True),
        "megatron": {"--tensor-model-parallel-size": 4, "--sequence-parallel": True},
        "torchtitan": {"parallelism.tensor_parallel_degree": 4, "parallelism.enable_sequence_parallel": True},
        "deepspeed": "AutoTP keeps tokens whole.* without --sequence-parallel",
        "accelerate": {"megatron_lm_config.megatron_lm_sequence_parallelism": True},
    },
    "context": {
        "plan": split_of(WIDE, context=2),
        "megatron": {"--context-parallel-size": 2, "--cp-comm-type": "p2p"},
        "torchtitan": {"parallelism.context_parallel_degree": 2, "parallelism.fsdp_reshard_after_forward": "never"},
        "deepspeed": "no rings of keys.*Plan without --context",
        "accelerate": {"megatron_lm_config.megatron_lm_context_parallel_size": 2},
    },
    "keys and values gathered": {
        "plan": split_of(WIDE, context=2, context_method="all_gather"),
        "megatron": {"--context-parallel-size": 2, "--cp-comm-type": "all_gather"},
        "torchtitan": {"parallelism.context_parallel_degree": 2},
        "deepspeed": "Plan without --context",
        "accelerate": {"megatron_lm_config.megatron_lm_context_parallel_size": 2},
    },
    "experts": {
        "plan": experts_of(WIDE, expert=4),
        "megatron": {"--expert-model-parallel-size": 4, "--moe-token-dispatcher-type": "alltoall"},
        "torchtitan": {
            "parallelism.expert_parallel_degree": 4,
            "parallelism.data_parallel_replicate_degree": 2,
            "parallelism.data_parallel_shard_degree": 4,
        },
        "deepspeed": {"zero_optimization.stage": 0},
        "accelerate": "no setting. Plan without --expert",
    },
    "experts and ZeRO 3": {
        "plan": experts_of(WIDE, expert=4, zero=3),
        "megatron": "Megatron-FSDP shards those of experts",
        "torchtitan": {
            "parallelism.expert_parallel_degree": 4,
            "parallelism.data_parallel_replicate_degree": 1,
            "parallelism.data_parallel_shard_degree": 8,
        },
        "deepspeed": "expert parallelism under ZeRO 3",
        "accelerate": "Plan without --expert",
    },
    "experts in a pipeline": {
        "plan": experts_of(STAGES, expert=2),
        "megatron": {"--expert-model-parallel-size": 2, "--pipeline-model-parallel-size": 2},
        "torchtitan": {"parallelism.expert_parallel_degree": 2, "parallelism.pipeline_parallel_degree": 2},
        "deepspeed": "expert parallelism in a pipeline",
        "accelerate": "Plan without --expert",
    },
    "experts and split products": {
        "plan": experts_of(WIDE, expert=2, tensor=2),
        "megatron": "Plan with --expert alone",
        "torchtitan": "Plan with --expert alone",
        "deepspeed": "Plan with --expert alone",
        "accelerate": "Plan without --expert",
    },
    "ZeRO 1": {
        "plan": split_of(WIDE, zero=1),
        "megatron": {"--use-distributed-optimizer": True, "--ddp-bucket-size": 13107200},
        "torchtitan": "also shards gradients. Plan with --zero 2",
        "deepspeed": {
            "zero_optimization.stage": 1,
            "zero_optimization.reduce_bucket_size": 13107200,
            "zero_optimization.overlap_comm": True,
        },
        "accelerate": {"megatron_lm_config.megatron_lm_use_distributed_optimizer": True},
    },
    "ZeRO 2": {
        "plan": split_of(WIDE, zero=2),
        "megatron": {**MEGATRON_FSDP, "--data-parallel-sharding-strategy": "optim_grads"},
        "torchtitan": {
            "parallelism.data_parallel_replicate_degree": 1,
            "parallelism.data_parallel_shard_degree": 2,
            "parallelism.fsdp_reshard_after_forward": "never",
        },
        "deepspeed": {"zero_optimization.stage": 2},
        "accelerate": {"distributed_type": "FSDP", "fsdp_config.fsdp_reshard_after_forward": False},
    },
    "ZeRO 3": {
        "plan": split_of(WIDE, zero=3),
        "megatron": {**MEGATRON_FSDP, "--data-parallel-sharding-strategy": "optim_grads_params"},
        "torchtitan": {
            "parallelism.data_parallel_shard_degree": 2,
            "parallelism.fsdp_reshard_after_forward": "always",
        },
        "deepspeed": {"zero_optimization.stage": 3},
        "accelerate": {
            "distributed_type": "FSDP",
            "fsdp_config.fsdp_version": 2,
            "fsdp_config.fsdp_reshard_after_forward": True,
        },
    },
    "ZeRO 1 in a pipeline": {
        "plan": split_of(STAGES, zero=1),
        "megatron": {"--use-distributed-optimizer": True},
        "torchtitan": "Plan with --zero 2",
        "deepspeed": {"zero_optimization.stage": 1},
        "accelerate": {"megatron_lm_config.megatron_lm_use_distributed_optimizer": True},
    },
    "ZeRO 3 in a pipeline": {
        "plan": split_of(STAGES, zero=3),
        "megatron": "not with pipelines. Plan with --zero 1, or --stages 1",
        "torchtitan": {
            "parallelism.pipeline_parallel_degree": 2,
            "parallelism.data_parallel_shard_degree": 2,
            "parallelism.fsdp_reshard_after_forward": "always",
        },
        "deepspeed": "does not support ZeRO 2 and 3. Plan with --zero 1, or --stages 1",
        "accelerate": "FSDP for one stage.*Plan with --zero 1, or --stages 1",
    },
    "states on the host": {
        "plan": replace(split_of(WIDE, zero=1), offload=Offload(optimizer="host")),
        "megatron": {
            "--optimizer-cpu-offload": True,
            "--use-precision-aware-optimizer": True,
            "--overlap-cpu-optimizer-d2h-h2d": True,
        },
        "torchtitan": "also shards gradients. Plan with --zero 2",
        "deepspeed": {"zero_optimization.stage": 1, "zero_optimization.offload_optimizer.device": "cpu"},
        "accelerate": "keeps parameters and optimizer states on the host together",
    },
    "states on drives": {
        "plan": replace(split_of(WIDE, zero=3), offload=Offload(optimizer="nvme", parameters="host")),
        "megatron": "keeps states on the host with its distributed optimizer",
        "torchtitan": "keeps parameters and optimizer states on the host together, with ZeRO 3",
        "deepspeed": {
            "zero_optimization.offload_optimizer.device": "nvme",
            "zero_optimization.offload_optimizer.nvme_path": "/local_nvme",
            "zero_optimization.offload_param.device": "cpu",
        },
        "accelerate": "by FSDP with ZeRO 3 in one stage",
    },
    "all on the host": {
        "plan": replace(split_of(WIDE, zero=3), offload=Offload(optimizer="host", parameters="host")),
        "megatron": "keeps states on the host with its distributed optimizer",
        "torchtitan": {"training.enable_cpu_offload": True, "parallelism.fsdp_reshard_after_forward": "always"},
        "deepspeed": {"zero_optimization.offload_optimizer.device": "cpu"},
        "accelerate": {"fsdp_config.fsdp_offload_params": True},
    },
    "states on the host without ZeRO": {
        "plan": replace(split_of(WIDE), offload=Offload(optimizer="host")),
        "megatron": "with its distributed optimizer",
        "torchtitan": "with ZeRO 3. Plan with another --offload",
        "deepspeed": "offloads with ZeRO 1 to 3 in one stage",
        "accelerate": "by FSDP with ZeRO 3 in one stage",
    },
    "activations on the host": {
        "plan": replace(split_of(WIDE, zero=1), offload=Offload(activations="host")),
        "megatron": {"--cpu-offloading-num-layers": 31, "--use-distributed-optimizer": True},
        "torchtitan": "also shards gradients. Plan with --zero 2",
        "deepspeed": "keeps inputs of recomputed blocks there",
        "accelerate": "has no setting for activations on the host",
    },
    "inputs of blocks on the host": {
        "plan": replace(split_of(WIDE, zero=3, again="full"), offload=Offload(activations="host")),
        "megatron": "without recompute",
        "torchtitan": "has no setting for activations on the host",
        "deepspeed": {"activation_checkpointing.cpu_checkpointing": True, "zero_optimization.stage": 3},
        "accelerate": "has no setting for activations on the host",
    },
    "ZeRO 3 with both axes": {
        "plan": split_of(WIDE, zero=3, tensor=2, context=2),
        "megatron": {**MEGATRON_FSDP, "--tensor-model-parallel-size": 2, "--context-parallel-size": 2},
        "torchtitan": {
            "parallelism.data_parallel_shard_degree": 2,
            "parallelism.tensor_parallel_degree": 2,
            "parallelism.context_parallel_degree": 2,
        },
        "deepspeed": "Plan without --context",
        "accelerate": {
            "parallelism_config.parallelism_config_dp_shard_size": 2,
            "parallelism_config.parallelism_config_tp_size": 2,
            "parallelism_config.parallelism_config_cp_size": 2,
            "parallelism_config.parallelism_config_cp_comm_strategy": "alltoall",
        },
    },
    "every block again": {
        "plan": split_of(STAGES, again="full"),
        "megatron": {
            "--recompute-granularity": "full",
            "--recompute-method": "uniform",
            "--recompute-num-layers": 1,
        },
        "torchtitan": {"activation_checkpoint": "full"},
        "deepspeed": {"pipeline.activation_checkpoint_interval": 1},
        "accelerate": {
            "megatron_lm_config.megatron_lm_recompute_granularity": "full",
            "megatron_lm_config.megatron_lm_recompute_method": "uniform",
            "megatron_lm_config.megatron_lm_recompute_num_layers": 1,
        },
    },
    "every block again under ZeRO 3": {
        "plan": split_of(WIDE, zero=3, again="full"),
        "megatron": {"--recompute-granularity": "full"},
        "torchtitan": {"activation_checkpoint": "full"},
        "deepspeed": {"zero_optimization.stage": 3},
        "accelerate": {"fsdp_config.fsdp_activation_checkpointing": True},
    },
    "attention again": {
        "plan": split_of(WIDE, again="attention"),
        "megatron": {"--recompute-granularity": "selective"},
        "torchtitan": "Plan with --recompute full",
        "deepspeed": {},
        "accelerate": {},
    },
    "blocks but for costly ops again": {
        "plan": split_of(WIDE, zero=3, again="op"),
        "megatron": "Plan with --recompute full or attention",
        "torchtitan": {"activation_checkpoint": "selective"},
        "deepspeed": {"zero_optimization.stage": 3},
        "accelerate": {"fsdp_config.fsdp_activation_checkpointing": False},
    },
    "every second block again": {
        "plan": split_of(WIDE, again="every-2"),
        "megatron": "computes layers 2, 4, 6",
        "torchtitan": "computes layers 2, 4, 6",
        "deepspeed": {},
        "accelerate": {},
    },
    "the first blocks again": {
        "plan": split_of(STAGES, again="1:5,17:21"),
        "megatron": {"--recompute-granularity": "full", "--recompute-method": "block", "--recompute-num-layers": 4},
        "torchtitan": "Plan with --recompute full",
        "deepspeed": {},
        "accelerate": {
            "megatron_lm_config.megatron_lm_recompute_method": "block",
            "megatron_lm_config.megatron_lm_recompute_num_layers": 4,
        },
    },
}
# Several systems leave what runs again, and pipelines' split ops, to the script: words of what is to be filled in.
SCRIPTED = [
    ("deepspeed", split_of(WIDE, again="full"), "deepspeed.checkpointing.checkpoint around every block"),
    ("deepspeed", split_of(WIDE, again="attention"), "checkpoint around attention"),
    ("deepspeed", split_of(WIDE, again="op"), "every block but for results of attention and products (create_select"),
    ("deepspeed", split_of(STAGES, again="full"), "checkpointable_layers"),
    (
        "deepspeed",
        split_of(STAGES, again="7:9"),
        "in the layers: deepspeed.checkpointing.checkpoint around layers 7, 8",
    ),
    ("deepspeed", split_of(STAGES, tensor=2), "PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)"),
    ("deepspeed", split_of(STAGES, tensor=2, sequence_parallel=True), "tensor 2 with sequence parallelism"),
    ("deepspeed", experts_of(WIDE, expert=2), "deepspeed.moe.layer.MoE(..., ep_size=2, drop_tokens=False)"),
    ("megatron", experts_of(WIDE, expert=2), "--num-experts"),
    ("accelerate", split_of(WIDE, again="full"), "torch.utils.checkpoint around every block"),
    ("accelerate", split_of(WIDE, zero=3, again="7:9"), "torch.utils.checkpoint around layers 7, 8"),
    ("accelerate", split_of(WIDE, zero=3, tensor=2), "tp_plan"),
    ("accelerate", split_of(WIDE, zero=3, context=2), "maybe_context_parallel"),
    ("accelerate", STAGES, "'recompute_granularity': None"),
    (
        "accelerate",
        split_of(STAGES, again="attention"),
        "'recompute_granularity': 'selective', 'recompute_method': None",
    ),
    ("megatron", split_of(WIDE, tensor=2), "CUDA_DEVICE_MAX_CONNECTIONS=1"),
    ("megatron", split_of(WIDE, zero=3, tensor=2), "CUDA_DEVICE_MAX_CONNECTIONS unset"),
]


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("choice", SAID)
def test_every_axis_is_said_or_refused(choice, system):
    plan, expected = SAID[choice]["plan"], SAID[choice][system]
    if isinstance(expected, str):
        with pytest.raises(PlanError, match=expected):
            export(system, plan)
        return
    settings = export(system, plan)
    check_documented(system, settings)
    found = dict(flat(settings.values))
    assert {name: found.get(name) for name in expected} == expected
    assert f"{plan.num_devices}" in settings.start or found.get("num_processes") == plan.num_devices


@pytest.mark.parametrize(("system", "plan", "words"), SCRIPTED)
def test_what_stands_in_the_script_is_to_be_filled_in(system, plan, words):
    assert words in " ".join(export(system, plan).fill_in)


@pytest.mark.parametrize(
    ("system", "plan", "words"),
    [
        ("megatron", split_of(WIDE, tensor=2, sequence_parallel=True), "keeps them split and gathers them again"),
        ("torchtitan", split_of(WIDE, tensor=2, sequence_parallel=True, regather=True), "torchtitan keeps them whole"),
        ("megatron", split_of(WIDE, zero=1, context=2), "Megatron-LM shards them among the ranks of this axis"),
        ("accelerate", split_of(WIDE, zero=2, context=2), "accelerate shards them among the ranks of this axis"),
        ("torchtitan", split_of(WIDE, context=2), "always shards them by FSDP2 there"),
        ("torchtitan", split_of(WIDE, context=2), "torchtitan gathers them"),
        ("torchtitan", experts_of(WIDE, expert=2), "shards it by FSDP2 among them"),
        ("megatron", experts_of(WIDE, expert=2, zero=1), "shards its states among these ranks, too"),
        ("accelerate", split_of(WIDE, context=2, context_method="all_gather"), "sends them round a ring"),
        ("megatron", split_of(WIDE, zero=2), "keeps them whole and gathers them once per step"),
        ("deepspeed", split_of(WIDE, zero=2), "keeps parameters whole and gathers them once per step"),
        ("deepspeed", split_of(WIDE, zero=3), "gathers module by module"),
        ("deepspeed", split_of(STAGES, zero=1), "DeepSpeed's pipeline sums after it"),
        ("deepspeed", split_of(WIDE, tensor=2), "counts every device as a replica"),
        ("accelerate", split_of(WIDE, zero=3, tensor=2), "tp_plan"),
        ("megatron", split_of(WIDE, again="full"), "recomputes all of it"),
        ("torchtitan", split_of(WIDE, again="full"), "recomputes all of it"),
    ],
)
def test_what_a_system_does_in_its_own_way_is_listed(system, plan, words):
    assert words in " ".join(item.reason for item in export(system, plan).unsaid)


def test_a_vocabulary_that_the_ranks_do_not_divide():
    plan = split_of(plan_of([(0, 34)], [range(2)], model="gpt2-small"), tensor=2)
    assert "pads it to 50,258" in " ".join(item.reason for item in export("megatron", plan).unsaid)
    assert "pads" not in " ".join(item.reason for item in export("megatron", SPLITS["tensor"]).unsaid)


def test_teams_fill_their_nodes():
    plan = split_of(WIDE, tensor=8)
    assert ranks_per_node(plan, load_cluster("2x8xH100")) == (8, 8)
    assert export("accelerate", plan).values["num_machines"] == 2


def test_zero_of_a_single_replica_shares_nothing():
    alone = plan_of([(0, 34)], [[0]])
    for system in SYSTEMS:
        for zero in (1, 2, 3):
            assert export(system, split_of(alone, zero=zero)) == export(system, alone)


@pytest.mark.parametrize(
    ("again", "count"),
    [
        ("1:3,17:19", 2),
        ("1:3,17:20", None),
        ("2:4,17:19", None),
        ("0:3,17:19", None),
        ("1:3,18:20", None),
        ("1:3", None),
        ("1:17,17:33", 16),
        ("17:19", None),
        ("32:34", None),
    ],
)
def test_the_first_blocks_of_every_stage(again, count):
    plan = split_of(STAGES, again=again)
    if count is None:
        with pytest.raises(PlanError, match="first blocks in every stage"):
            export("megatron", plan)
        return
    found = export("megatron", plan).values["--recompute-num-layers"]
    # All blocks have a word of their own.
    assert found == (1 if count == 16 else count)


def test_stages_with_fewer_blocks_compute_all_of_them_again():
    uneven = plan_of([(0, 4), (4, 34)], [[0], [1]], cluster="2xH100")
    assert export("megatron", split_of(uneven, again="1:4,4:9")).values["--recompute-num-layers"] == 5
    with pytest.raises(PlanError, match="first blocks"):
        export("megatron", split_of(uneven, again="1:3,4:9"))


def test_parts_of_layers_are_said_by_scripts_only():
    plan = replace(WIDE, recompute=((0, 2),))
    for system in ("megatron", "torchtitan"):
        with pytest.raises(PlanError, match="parts of layers"):
            export(system, plan)
    assert "around parts of layers" in " ".join(export("deepspeed", plan).fill_in)
    with pytest.raises(PlanError, match="Give the graph"):
        export("deepspeed", plan, names=None)


def test_optimizers_whose_states_are_not_shared():
    plan = split_of(replace(WIDE, workload=replace(WIDE.workload, optimizer=Optimizer(kind="sgd"))), zero=1)
    for system in ("megatron", "accelerate"):
        with pytest.raises(PlanError, match="for Adam only"):
            export(system, plan)
    assert export("deepspeed", plan).values["zero_allow_untested_optimizer"] is True


@pytest.mark.parametrize("system", ["megatron", "torchtitan", "accelerate"])
def test_tokens_that_the_ranks_cannot_share(system):
    plan = split_of(plan_of([(0, 34)], [range(2)], model_sizes=(("sequence_length", 1022),)), context=2)
    with pytest.raises(PlanError, match="1022 tokens are not a multiple"):
        export(system, plan)


def test_groups_of_replicas_that_share_states():
    plan = split_of(plan_of([(0, 34)], [range(8)]), zero=3, shard_size=4)
    found = export("torchtitan", plan).values
    assert found["parallelism.data_parallel_replicate_degree"] == 2
    assert found["parallelism.data_parallel_shard_degree"] == 4
    found = export("megatron", plan).values
    assert (found["--num-distributed-optimizer-instances"], found["--outer-dp-sharding-strategy"]) == (2, "no_shard")
    sizes = export("accelerate", plan).values["parallelism_config"]
    assert (sizes["parallelism_config_dp_replicate_size"], sizes["parallelism_config_dp_shard_size"]) == (2, 4)
    settings = export("deepspeed", plan)
    assert settings.values["zero_optimization"]["mics_shard_size"] == 4
    assert any("MiCS_Init" in item for item in settings.fill_in)


def test_groups_of_replicas_that_share_states_of_the_optimizer_alone():
    plan = split_of(plan_of([(0, 17), (17, 34)], [range(4), range(4, 8)], count=16), zero=1, shard_size=2)
    assert export("megatron", plan).values["--num-distributed-optimizer-instances"] == 2
    for system, words in (("deepspeed", "MiCS, with ZeRO 3 only"), ("accelerate", "among all replicas")):
        with pytest.raises(PlanError, match=words):
            export(system, plan)


def test_split_plans_on_processors():
    for plan, words in ((split_of(WIDE, tensor=2), "GPUs"), (split_of(WIDE, zero=3), "on GPUs")):
        with pytest.raises(PlanError, match=words):
            export("accelerate", replace(plan, cluster="2x2xcpu"))


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (replace(DATA, exchange=GradientExchange(every_steps=2)), "another way"),
        (replace(DATA, exchange=GradientExchange(clip_norm=True)), "exchange.clip_norm = "),
        (replace(STAGES, stages=(replace(STAGES.stages[0], feeds=(1,)), STAGES.stages[1])), "stages.feeds = "),
        (split_of(WIDE, tensor=2, placements=(OpPlacement(op="head"),)), "sharding.placements = "),
    ],
)
def test_what_no_export_says_is_refused(system, plan, words):
    with pytest.raises(PlanError, match=words):
        export(system, plan)


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize(
    ("owner", "field", "plan"),
    [
        (Sharding, "tensor", split_of(WIDE, tensor=2)),
        (Sharding, "context", split_of(WIDE, context=2)),
        (Sharding, "expert", experts_of(WIDE, expert=2)),
        (Sharding, "sequence_parallel", split_of(WIDE, tensor=2, sequence_parallel=True)),
        (Sharding, "regather", split_of(WIDE, tensor=2, sequence_parallel=True, regather=True)),
        (Sharding, "context_method", split_of(WIDE, context=2, context_method="all_gather")),
        (GradientExchange, "zero", split_of(WIDE, zero=2)),
        (GradientExchange, "shard_size", split_of(WIDE, zero=3, shard_size=2)),
        (GradientExchange, "overlap", replace(WIDE, exchange=GradientExchange(overlap=False))),
        (Plan, "recompute", split_of(WIDE, again="full")),
        (Plan, "sharding", split_of(WIDE, tensor=2)),
    ],
)
def test_an_axis_that_exports_were_not_taught_is_refused(monkeypatch, system, owner, field, plan):
    """A field that nobody declared as said, as one that is new in plans, is never left out."""
    monkeypatch.setitem(split.SAID, owner, split.SAID[owner] - {field})
    with pytest.raises(PlanError, match=field):
        export(system, plan)
    assert field in " ".join(item.what for item in orders_of(plan).unsaid)


def test_every_declared_field_exists():
    for owner, names in split.SAID.items():
        assert names <= {item.name for item in fields(owner)}


def orders_of(plan):
    return export_orders(plan, "", num_lines=1, num_pipelines=1, shared_stage=None)


@pytest.mark.parametrize("name", [name for name in SPLITS if name != "data"])
def test_a_file_of_orders_lists_how_stages_are_made(name):
    plan = SPLITS[name]
    words = [item.what for item in orders_of(plan).unsaid]
    assert any(word.startswith(plan.sharding.describe() or "none") for word in words) == (not plan.sharding.is_whole)
    assert any(word.startswith(f"ZeRO {plan.exchange.zero}") for word in words) == (plan.exchange.zero > 0)
    assert any("recomputed" in word for word in words) == bool(plan.recompute)


def every_split():
    """Every combination of choices, of one stage and of two."""
    tensors = [{}] + [
        {"tensor": size, "sequence_parallel": sequence, "regather": regather}
        for size in (2, 4)
        for sequence, regather in ((False, False), (True, False), (True, True))
    ]
    contexts = [{}, {"context": 2}, {"context": 2, "context_method": "all_gather"}]
    for stages, zero, again in itertools.product(
        (WIDE, STAGES), range(4), ("none", "op", "attention", "full", "1:4,17:20")
    ):
        for tensor, context in itertools.product(tensors, contexts):
            yield split_of(replace(stages, cluster="16x8xH100"), zero=zero, again=again, **tensor, **context)


EVERY_SPLIT = list(every_split())


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.matrix
def test_no_choice_of_a_split_is_left_out(system):
    """Different plans never become the same file with the same remarks."""
    found = {}
    for plan in EVERY_SPLIT:
        settings = export_or_none(system, plan)
        if settings is not None:
            check_documented(system, settings)
            other = found.setdefault((settings.text, settings.fill_in, settings.unsaid), plan)
            assert other is plan, f"{plan.describe()} and {other.describe()}"
    assert len(found) > len(EVERY_SPLIT) // 10


def test_no_choice_of_a_split_is_left_out_of_orders():
    found = {(len(plan.stages), orders_of(plan).unsaid) for plan in EVERY_SPLIT}
    assert len(found) == len(EVERY_SPLIT)


def test_the_axes_make_up_all_devices():
    for plan in EVERY_SPLIT[::7]:
        check_axes(plan)


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("expert", [2, 4])
@pytest.mark.parametrize("stages", [WIDE, STAGES])
def test_ranks_of_experts_have_samples_of_their_own(stages, expert, zero):
    plan = experts_of(replace(stages, cluster="4x8xH100"), expert=expert, zero=zero)
    replicas = 2 * expert
    assert plan.num_devices == replicas * len(plan.stages)
    samples = plan.workload.global_batch
    if (megatron := export_or_none("megatron", plan)) is not None:
        assert samples % (megatron.values["--micro-batch-size"] * replicas) == 0
        assert replicas % megatron.values["--expert-model-parallel-size"] == 0
    if (titan := export_or_none("torchtitan", plan)) is not None:
        names = ("data_parallel_replicate", "data_parallel_shard", "pipeline_parallel")
        assert math.prod(titan.values[f"parallelism.{name}_degree"] for name in names) == plan.num_devices
        assert samples % (titan.values["training.local_batch_size"] * replicas) == 0
        assert titan.values["parallelism.data_parallel_shard_degree"] % expert == 0
    if (deepspeed := export_or_none("deepspeed", plan)) is not None:
        values = deepspeed.values
        each = values["train_micro_batch_size_per_gpu"] * values["gradient_accumulation_steps"]
        assert each * replicas == values["train_batch_size"] == samples


def check_axes(plan):
    """What each system multiplies to its world size, by its documentation."""
    replicas, stages = len(plan.stages[0].ranks), len(plan.stages)
    if (megatron := export_or_none("megatron", plan)) is not None:
        values = megatron.values
        axes = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")
        assert math.prod(values.get(name, 1) for name in axes) * replicas == plan.num_devices
        count = values["--global-batch-size"] // values["--micro-batch-size"] // replicas
        assert count == plan.num_microbatches // replicas
    if (titan := export_or_none("torchtitan", plan)) is not None:
        degrees = [value for name, value in titan.values.items() if name.endswith("_degree")]
        assert len(degrees) == 5
        assert math.prod(degrees) == plan.num_devices
    if (deepspeed := export_or_none("deepspeed", plan)) is not None:
        values = deepspeed.values
        tensor = values.get("tensor_parallel", {}).get("autotp_size", plan.sharding.tensor)
        assert tensor * stages * replicas == plan.num_devices
        samples = values["train_micro_batch_size_per_gpu"] * values["gradient_accumulation_steps"] * replicas
        assert samples == plan.workload.global_batch == values.get("train_batch_size", samples)
        # DeepSpeed checks the total against all devices where AutoTP splits ops, and takes none there.
        assert ("train_batch_size" in values) == ("tensor_parallel" not in values)
    if (accelerate := export_or_none("accelerate", plan)) is not None:
        values = accelerate.values
        assert values["num_processes"] == plan.num_devices
        if "megatron_lm_config" in values:
            words = ("tp_degree", "pp_degree", "context_parallel_size")
            sizes = [values["megatron_lm_config"][f"megatron_lm_{word}"] for word in words]
            assert math.prod(sizes) * replicas == plan.num_devices
        if "parallelism_config" in values:
            sizes = [value for name, value in values["parallelism_config"].items() if name.endswith("_size")]
            assert math.prod(sizes) == plan.num_devices
