"""Exported settings load in the systems' own code: plans and split plans in each system that is installed.

accelerate and megatron-core are installed by `make`. torchtitan (which needs triton) and DeepSpeed (built from source)
are not; in an environment that has them, these tests run too (docs/concepts/other-systems.md).
"""

import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys

import pytest

from meshwright.report.settings import export_settings
from meshwright.spec import PlanError, load_cluster
from tests.report.plans import PLANS, SPLITS, graph_of, plan_of

pytestmark = pytest.mark.timeout(180)

CUTS = {
    **PLANS,
    "apart": plan_of([(0, 1), (1, 33), (33, 34)], [[0, 3], [1, 4], [2, 5]]),
    "replica-major": plan_of([(0, 17), (17, 34)], [[0, 2, 4, 6], [1, 3, 5, 7]]),
}


def require(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")


def export(system, plan):
    return export_settings(system, plan, load_cluster(plan.cluster), graph_of())


def exportable(system):
    """The split plans that a system does not refuse, with their settings."""
    found = {}
    for name, plan in SPLITS.items():
        with contextlib.suppress(PlanError):
            found[name] = export(system, plan)
    assert len(found) > len(SPLITS) // 2
    return found


def devices_of(plan, axis):
    """The groups of devices along an axis: rank r's team is r·w ... r·w + w - 1, and the tensor axis its innermost."""
    tensor, context, width = plan.sharding.tensor, plan.sharding.context, plan.sharding.width
    ranks = [rank for stage in plan.stages for rank in stage.ranks]
    if axis == "tp":
        return [[r * width + c * tensor + t for t in range(tensor)] for r in ranks for c in range(context)]
    if axis == "cp":
        return [[r * width + c * tensor + t for c in range(context)] for r in ranks for t in range(tensor)]
    places = [(stage, place) for stage in plan.stages for place in range(width)]
    return [[r * width + place for r in stage.ranks] for stage, place in places]


def load(code, folder, argument=None):
    """Run code in a process of its own (these packages warn and change global state); its last line is JSON."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, json.dumps(argument)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


ACCELERATE = """
import json, os, sys
from accelerate.utils import MegatronLMPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
found = []
for file in json.loads(sys.argv[1]):
    config = load_config_from_file(file)
    arguments = launch_command_parser().parse_args(["--config_file", file, "script.py"])
    known = vars(arguments)
    for group in (config.megatron_lm_config, config.fsdp_config, config.parallelism_config):
        assert set(group) <= set(known), group
    arguments, _, _ = _validate_launch_command(arguments)
    os.environ.clear()
    os.environ.update(prepare_multi_gpu_env(arguments))
    plugin = vars(MegatronLMPlugin()) if arguments.use_megatron_lm else {}
    mesh = {key: value for key, value in os.environ.items() if key.startswith(("PARALLELISM_", "FSDP_"))}
    names = ("num_processes", "num_machines", "mixed_precision", "multi_gpu", "use_megatron_lm",
             "megatron_lm_pp_degree", "megatron_lm_num_micro_batches", "megatron_lm_decoder_last_pipeline_num_layers")
    found.append({
        **{name: getattr(arguments, name) for name in names}, "type": config.distributed_type.value, "mesh": mesh,
        "plugin": plugin.get("megatron_lm_default_args"),
    })
print(json.dumps(found))
"""


def test_accelerate_reads_its_files(tmp_path):
    require("accelerate")
    plans = {**PLANS, "cpu": plan_of([(0, 34)], [[0, 1]], cluster="2xcpu", precision="float32")}
    for name, plan in plans.items():
        (tmp_path / f"{name}.yaml").write_text(export("accelerate", plan).text)
    found = dict(zip(plans, load(ACCELERATE, tmp_path, [f"{name}.yaml" for name in plans]), strict=True))
    assert {name: row["type"] for name, row in found.items()} == {
        "data": "MULTI_GPU",
        "pipeline": "MEGATRON_LM",
        "pipeline x data": "MEGATRON_LM",
        "cpu": "MULTI_CPU",
    }
    assert {name: row["num_processes"] for name, row in found.items()} == {
        name: plan.num_ranks for name, plan in plans.items()
    }
    assert [row["mixed_precision"] for row in found.values()] == ["bf16", "bf16", "bf16", "no"]
    assert found["data"]["multi_gpu"]
    both = found["pipeline x data"]
    assert (both["num_machines"], both["use_megatron_lm"]) == (2, True)
    assert (both["megatron_lm_pp_degree"], both["megatron_lm_num_micro_batches"]) == (2, 16)
    assert found["pipeline"]["megatron_lm_decoder_last_pipeline_num_layers"] == 18


@pytest.mark.long
def test_accelerate_hands_splits_on(tmp_path):
    """What its launcher tells processes, and what its plugin makes of that by its own defaults."""
    require("accelerate")
    settings = exportable("accelerate")
    for index, found in enumerate(settings.values()):
        (tmp_path / f"{index}.yaml").write_text(found.text)
    rows = load(ACCELERATE, tmp_path, [f"{index}.yaml" for index in range(len(settings))])
    for name, row in zip(settings, rows, strict=True):
        plan, mesh = SPLITS[name], row["mesh"]
        assert row["num_processes"] == plan.num_devices
        if row["type"] == "MEGATRON_LM":
            plugin = row["plugin"]
            assert (plugin["tensor_model_parallel_size"], plugin["context_parallel_size"]) == (
                plan.sharding.tensor,
                plan.sharding.context,
            )
            assert plugin["sequence_parallel"] == plan.sharding.sequence_parallel
            assert plugin["use_distributed_optimizer"] == (plan.exchange.zero == 1)
            if name == "first blocks":
                assert (plugin["recompute_method"], plugin["recompute_num_layers"]) == ("block", 4)
            # The reason for the line of the script that other plans need.
            elif not plan.recompute:
                assert plugin["recompute_granularity"] == "full"
                assert "'recompute_granularity': None" in " ".join(settings[name].fill_in)
        elif row["type"] == "FSDP":
            assert mesh["FSDP_VERSION"] == "2"
            assert mesh["FSDP_RESHARD_AFTER_FORWARD"] == str(plan.exchange.zero == 3).lower()
            # Of a block, all or nothing runs again there.
            assert mesh["FSDP_ACTIVATION_CHECKPOINTING"] == str(bool(plan.recompute) and not plan.keeps).lower()
            (groups,) = {plan.exchange.shard_groups(stage.ranks) for stage in plan.stages}
            assert ("PARALLELISM_CONFIG_TP_SIZE" in mesh) == (plan.sharding.width > 1 or len(groups) > 1)
            if "PARALLELISM_CONFIG_TP_SIZE" in mesh:
                sizes = [mesh[f"PARALLELISM_CONFIG_{axis}_SIZE"] for axis in ("DP_REPLICATE", "DP_SHARD", "CP", "TP")]
                split = len(groups), len(groups[0]), plan.sharding.context, plan.sharding.tensor
                assert sizes == list(map(str, split))
                if plan.sharding.context > 1:
                    assert mesh["PARALLELISM_CONFIG_CP_COMM_STRATEGY"] == "alltoall"
        else:
            assert row["type"] == "MULTI_GPU"
            assert plan.sharding.is_whole
            assert plan.exchange.zero == 0


MEGATRON = """
import json, sys
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.parallel_state import RankGenerator
from megatron.core.transformer import TransformerConfig
found = []
for values in json.loads(sys.argv[1]):
    config = TransformerConfig(
        num_layers=values["--num-layers"],
        hidden_size=values["--hidden-size"],
        ffn_hidden_size=values["--ffn-hidden-size"],
        num_attention_heads=values["--num-attention-heads"],
        num_query_groups=values["--num-query-groups"],
        normalization=values["--normalization"],
        layernorm_epsilon=values["--norm-epsilon"],
        gated_linear_unit=values["--swiglu"],
        activation_func=torch.nn.functional.silu,
        add_bias_linear=not values["--disable-bias-linear"],
        hidden_dropout=values["--hidden-dropout"],
        attention_dropout=values["--attention-dropout"],
        bf16=values["--bf16"],
        pipeline_dtype=torch.bfloat16,
        tensor_model_parallel_size=values["--tensor-model-parallel-size"],
        sequence_parallel=values.get("--sequence-parallel", False),
        context_parallel_size=values.get("--context-parallel-size", 1),
        cp_comm_type=values.get("--cp-comm-type"),
        recompute_granularity=values.get("--recompute-granularity"),
        recompute_method=values.get("--recompute-method"),
        recompute_num_layers=values.get("--recompute-num-layers"),
        pipeline_model_parallel_size=values["--pipeline-model-parallel-size"],
        pipeline_model_parallel_layout=values.get("--pipeline-model-parallel-layout"),
    )
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        layout.validate_layer_layout(config.num_layers, None)
    DistributedDataParallelConfig(
        overlap_grad_reduce=values.get("--overlap-grad-reduce", False),
        overlap_param_gather=values.get("--overlap-param-gather", False),
        bucket_size=values.get("--ddp-bucket-size"),
        use_distributed_optimizer=values.get("--use-distributed-optimizer", False),
        use_megatron_fsdp=values.get("--use-megatron-fsdp", False),
        data_parallel_sharding_strategy=values.get("--data-parallel-sharding-strategy", "no_shard"),
    )
    OptimizerConfig(
        optimizer=values["--optimizer"],
        use_distributed_optimizer=values.get("--use-distributed-optimizer", False),
    )
    stages, world = values["--pipeline-model-parallel-size"], values["world"]
    tensor, context = config.tensor_model_parallel_size, config.context_parallel_size
    order = "tp-cp-ep-pp-dp" if values.get("--use-tp-pp-dp-mapping") else "tp-cp-ep-dp-pp"
    replicas = world // (stages * tensor * context)
    ranks = RankGenerator(tp=tensor, ep=1, dp=replicas, pp=stages, cp=context, order=order)
    found.append({
        "stages": layout and [[kind.name for kind in stage[0]] for stage in layout.layout],
        "replicas": ranks.get_ranks("dp"),
        "tp": ranks.get_ranks("tp"),
        "cp": ranks.get_ranks("cp"),
    })
print(json.dumps(found))
"""


@pytest.mark.long
def test_megatron_core_takes_its_arguments(tmp_path):
    require("megatron-core")
    rows = [{**export("megatron", plan).values, "world": plan.num_ranks} for plan in CUTS.values()]
    found = dict(zip(CUTS, load(MEGATRON, tmp_path, rows), strict=True))
    # Megatron's own rank generator puts the replicas of every stage where the plan has them.
    for name, plan in CUTS.items():
        if name != "apart":
            assert found[name]["replicas"] == [list(stage.ranks) for stage in plan.stages], name
    assert found["data"]["stages"] is None
    blocks = [stage.count("decoder") for stage in found["pipeline"]["stages"]]
    assert blocks == [14, 18]
    assert found["apart"]["stages"] == [["embedding"], ["decoder"] * 32, ["loss"]]


@pytest.mark.long
def test_megatron_core_takes_split_plans(tmp_path):
    """Its rank generator makes the teams of the plans; its configurations check what goes together."""
    require("megatron-core")
    settings = exportable("megatron")
    rows = [{**found.values, "world": SPLITS[name].num_devices} for name, found in settings.items()]
    for name, row in zip(settings, load(MEGATRON, tmp_path, rows), strict=True):
        plan = SPLITS[name]
        assert sorted(row["replicas"]) == sorted(devices_of(plan, "dp")), name
        assert sorted(row["tp"]) == sorted(devices_of(plan, "tp")), name
        assert sorted(row["cp"]) == sorted(devices_of(plan, "cp")), name


DEEPSPEED = """
import json, sys
import deepspeed.runtime.config as runtime
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.runtime.utils import partition_uniform
found = []
for file, stages, replicas, tensor in json.loads(sys.argv[1]):
    topology = PipeModelDataParallelTopology(stages, tensor, replicas)
    class Group:
        def get_data_parallel_world_size(self):
            return replicas
    runtime.dist.get_rank = lambda *_: 0
    config = runtime.DeepSpeedConfig(file, mpu=Group())
    found.append({
        "batch": [config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps],
        "bf16": config.bfloat16_config.enabled,
        "zero": config.zero_config.stage,
        "overlap": config.zero_config.overlap_comm,
        "autotp": config.tensor_parallel_config.autotp_size,
        "again": config.pipeline["activation_checkpoint_interval"],
        "tp": topology.get_axis_comm_lists("model"),
        "optimizer": config.optimizer_name,
        "replicas": topology.get_axis_comm_lists("data"),
        "uniform": [int(part) for part in partition_uniform(34, stages)],
    })
print(json.dumps(found))
"""


def test_deepspeed_reads_its_files(tmp_path):
    require("deepspeed")
    rows = []
    for name, plan in PLANS.items():
        (tmp_path / f"{name}.json").write_text(export("deepspeed", plan).text)
        rows.append([f"{name}.json", len(plan.stages), len(plan.stages[0].ranks), 1])
    found = dict(zip(PLANS, load(DEEPSPEED, tmp_path, rows), strict=True))
    for name, plan in PLANS.items():
        row, replicas = found[name], len(plan.stages[0].ranks)
        assert row["batch"] == [plan.workload.global_batch, plan.microbatch_size, plan.num_microbatches // replicas]
        assert (row["bf16"], row["zero"], row["optimizer"]) == (True, 0, "adamw")
        if replicas > 1:
            assert row["replicas"] == [list(stage.ranks) for stage in plan.stages]
        uniform = "partition_method='uniform'" in " ".join(export("deepspeed", plan).fill_in)
        bounds = [0, *(stage.stop for stage in plan.stages)]
        assert uniform == (len(plan.stages) > 1 and row["uniform"] == bounds)


def test_deepspeed_reads_split_plans(tmp_path):
    require("deepspeed")
    settings = exportable("deepspeed")
    rows = []
    for index, (name, found) in enumerate(settings.items()):
        (tmp_path / f"{index}.json").write_text(found.text)
        plan = SPLITS[name]
        rows.append([f"{index}.json", len(plan.stages), len(plan.stages[0].ranks), plan.sharding.tensor])
    for name, row in zip(settings, load(DEEPSPEED, tmp_path, rows), strict=True):
        plan, in_pipeline = SPLITS[name], len(SPLITS[name].stages) > 1
        # Samples of all replicas, which DeepSpeed makes up where the file does not name them.
        assert row["batch"][0] == plan.workload.global_batch
        assert row["zero"] == plan.exchange.zero
        assert row["overlap"] == (plan.exchange.zero > 0 and not in_pipeline)
        assert row["autotp"] == (0 if in_pipeline or plan.sharding.tensor == 1 else plan.sharding.tensor)
        assert row["again"] == int(name == "tensor x pipeline")
        assert row["replicas"] == devices_of(plan, "dp"), name
        assert row["tp"] == devices_of(plan, "tp"), name


TORCHTITAN = """
import json, sys
from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims
found = []
for module, world in json.loads(sys.argv[1]):
    config = ConfigManager().parse_args(["--module", module, "--config", "plan"])
    config.model_spec.model.update_from_config(config=config)
    dims = ParallelDims.from_config(config.parallelism, world)
    layers = len(config.model_spec.model.layers)
    found.append({
        "batch": [config.training.local_batch_size, config.training.global_batch_size],
        "degrees": [config.parallelism.pipeline_parallel_degree, config.parallelism.data_parallel_replicate_degree],
        "schedule": config.parallelism.pipeline_parallel_schedule,
        "parts": config.parallelism.module_fqns_per_model_part,
        "layers": layers,
        "dtype": config.training.mixed_precision_param,
        "checkpointing": type(config.activation_checkpoint).__qualname__,
        "sizes": [getattr(dims, axis) for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp")],
        "reshard": config.parallelism.fsdp_reshard_after_forward,
        "sequence": config.parallelism.enable_sequence_parallel,
        "balancer": config.parallelism.context_parallel_load_balancer,
    })
print(json.dumps(found))
"""


def test_torchtitan_reads_its_modules(tmp_path):
    require("torchtitan")
    require("triton")
    modules = {name: f"plan_{i}" for i, name in enumerate(PLANS)}
    for name, module in modules.items():
        (tmp_path / f"{module}.py").write_text(export("torchtitan", PLANS[name]).text)
    rows = [[module, PLANS[name].num_devices] for name, module in modules.items()]
    found = dict(zip(modules, load(TORCHTITAN, tmp_path, rows), strict=True))
    assert {name: row["degrees"] for name, row in found.items()} == {
        "data": [1, 4],
        "pipeline": [2, 1],
        "pipeline x data": [2, 8],
    }
    assert found["data"]["batch"] == [2, 16]
    assert found["pipeline"]["batch"] == [16, 16]
    assert found["pipeline x data"]["batch"] == [16, 128]
    assert [found[name]["schedule"] for name in ("pipeline", "pipeline x data")] == ["GPipe", "1F1B"]
    for row in found.values():
        assert (row["layers"], row["dtype"], row["checkpointing"]) == (32, "bfloat16", "NoneType")
        if row["parts"] is not None:
            names = [name for part in row["parts"] for name in part]
            assert names == ["tok_embeddings", *(f"layers.{i}" for i in range(row["layers"])), "norm", "lm_head"]


def test_torchtitan_reads_split_plans(tmp_path):
    require("torchtitan")
    require("triton")
    settings = exportable("torchtitan")
    rows = []
    for index, (name, found) in enumerate(settings.items()):
        (tmp_path / f"plan_{index}.py").write_text(found.text)
        rows.append([f"plan_{index}", SPLITS[name].num_devices])
    for name, row in zip(settings, load(TORCHTITAN, tmp_path, rows), strict=True):
        plan = SPLITS[name]
        sharding, replicas = plan.sharding, len(plan.stages[0].ranks)
        replicated = [1, replicas] if plan.exchange.zero else [replicas, 1]
        assert row["sizes"] == [*replicated, sharding.context, sharding.tensor, len(plan.stages)]
        assert row["checkpointing"] == ("FullAC.Config" if plan.recompute else "NoneType")
        if sharding.tensor > 1:
            assert row["sequence"] == sharding.sequence_parallel
        if plan.exchange.zero:
            assert row["reshard"] == {2: "never", 3: "always"}[plan.exchange.zero]
