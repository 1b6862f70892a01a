"""Plans in the words of other systems: documented names and values, the arithmetic between them, nothing unsaid."""

import argparse
import ast
import itertools
import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.report.settings import SYSTEMS, export_settings, gather_facts
from meshwright.spec import GradientExchange, Optimizer, PlanError, load_cluster
from tests.report.plans import LLAMA, PLANS, SPLITS, graph_of, plan_of

OPTIONS = tomllib.loads((Path(__file__).parent / "data" / "system_options.toml").read_text())
PAIRS = [(system, name) for system in SYSTEMS for name in PLANS]


def export(system, plan, names=LLAMA):
    return export_settings(system, plan, load_cluster(plan.cluster), graph_of(names) if names else None)


def export_or_none(system, plan):
    """None for a plan that the system refuses."""
    try:
        return export(system, plan)
    except PlanError:
        return None


def flat(values, prefix=""):
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


TYPES = {
    "int": lambda value: type(value) is int,
    "float": lambda value: type(value) in (int, float),
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "flag": lambda value: value is True,
    "list": lambda value: isinstance(value, list) and all(isinstance(item, list) for item in value),
    "str or none": lambda value: value is None or isinstance(value, str),
}


def check_documented(system, settings):
    for name, value in flat(settings.values):
        option = OPTIONS[system]["options"].get(name)
        assert option is not None, f"{system} documents no {name}"
        assert TYPES[option["type"]](value), (name, value)
        assert value is None or value in option.get("choices", [value]), (name, value)


@pytest.mark.parametrize(("system", "name"), PAIRS)
def test_every_setting_is_documented(system, name):
    check_documented(system, export(system, PLANS[name]))


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("precision", ["float32", "tf32", "mixed", "bfloat16", "mixed-bf16-gradients", "float8"])
@pytest.mark.parametrize("optimizer", [Optimizer(), Optimizer(kind="sgd"), Optimizer(kind="sgd", momentum=True)])
def test_every_variant_is_documented_or_refused(system, precision, optimizer):
    for bounds, ranks in (([(0, 34)], [[0]]), ([(0, 1), (1, 33), (33, 34)], [[0, 3], [1, 4], [2, 5]])):
        for overlap in (False, True):
            plan = plan_of(
                bounds,
                ranks,
                precision=precision,
                optimizer=optimizer,
                exchange=GradientExchange(overlap=overlap),
                schedule="gpipe",
            )
            if system == "torchtitan" and optimizer.kind == "sgd":
                with pytest.raises(PlanError, match="Adam"):
                    export(system, plan)
                continue
            check_documented(system, export(system, plan))


@pytest.mark.parametrize("name", PLANS)
def test_all_systems_compute_the_same_batch(name):
    plan = PLANS[name]
    batch, replicas, stages = plan.workload.global_batch, len(plan.stages[0].ranks), len(plan.stages)
    megatron = export("megatron", plan).values
    assert megatron["--global-batch-size"] == batch
    assert megatron["--micro-batch-size"] == plan.microbatch_size
    assert megatron["--pipeline-model-parallel-size"] == stages
    deepspeed = export("deepspeed", plan).values
    per_replica = deepspeed["train_micro_batch_size_per_gpu"] * deepspeed["gradient_accumulation_steps"]
    assert per_replica * replicas == deepspeed["train_batch_size"] == batch
    titan = export("torchtitan", plan).values
    assert titan["training.global_batch_size"] == batch
    assert batch % (titan["training.local_batch_size"] * titan["parallelism.data_parallel_replicate_degree"]) == 0
    if stages > 1:
        # A pipeline takes its whole batch at once, in microbatches.
        assert titan["training.local_batch_size"] * replicas == batch
        assert titan["parallelism.pipeline_parallel_microbatch_size"] == plan.microbatch_size
    else:
        assert titan["training.local_batch_size"] == plan.microbatch_size
    accelerate = export("accelerate", plan).values
    assert accelerate["num_processes"] == plan.num_ranks == stages * replicas
    if stages > 1:
        count = accelerate["megatron_lm_config"]["megatron_lm_num_micro_batches"]
        assert count * plan.microbatch_size * replicas == batch


def test_cuts_are_said_in_each_systems_way():
    plan = PLANS["pipeline"]
    assert export("megatron", plan).values["--pipeline-model-parallel-layout"] == "Et*14|t*18L"
    first, second = export("torchtitan", plan).values["parallelism.module_fqns_per_model_part"]
    assert (first[0], first[-1], second[0]) == ("tok_embeddings", "layers.13", "layers.14")
    assert second[-3:] == ["layers.31", "norm", "lm_head"]
    assert [*first, *second] == ["tok_embeddings", *(f"layers.{i}" for i in range(32)), "norm", "lm_head"]
    assert export("accelerate", plan).values["megatron_lm_config"]["megatron_lm_decoder_last_pipeline_num_layers"] == 18
    assert "the cut 0:15, 15:34" in [item.what for item in export("deepspeed", plan).unsaid]
    even = PLANS["pipeline x data"]
    assert "--pipeline-model-parallel-layout" not in export("megatron", even).values
    assert "partition_method='uniform'" in " ".join(export("deepspeed", even).fill_in)
    # The layers outside of the blocks may have stages of their own.
    apart = plan_of([(0, 1), (1, 33), (33, 34)], [[0], [1], [2]])
    assert export("megatron", apart).values["--pipeline-model-parallel-layout"] == "E|t*32|L"
    assert [len(part) for part in export("torchtitan", apart).values["parallelism.module_fqns_per_model_part"]] == [
        1,
        32,
        2,
    ]
    assert "the cut 0:1, 1:33, 33:34" in [item.what for item in export("accelerate", apart).unsaid]


def test_the_order_of_ranks_is_said_or_listed():
    replica_major = plan_of([(0, 17), (17, 34)], [[0, 2, 4, 6], [1, 3, 5, 7]])
    scattered = plan_of([(0, 17), (17, 34)], [[7, 6, 5, 4], [3, 2, 1, 0]])
    assert export("megatron", replica_major).values["--use-tp-pp-dp-mapping"] is True
    for system in SYSTEMS:
        said = system == "megatron"
        for plan in (replica_major, scattered):
            listed = "order of the ranks" in [item.what for item in export(system, plan).unsaid]
            assert listed == (not said or plan is scattered), system
        usual = [item.what for item in export(system, PLANS["pipeline x data"]).unsaid]
        assert "order of the ranks" not in usual


def test_what_has_no_setting_is_listed_with_its_reason():
    """Every field of the plan that a system has no word for: schedule, buckets, overlap."""
    late = plan_of(
        [(0, 17), (17, 34)],
        [[0, 1], [2, 3]],
        schedule="gpipe",
        exchange=GradientExchange(bucket_bytes=1234567, overlap=False),
    )
    for system in SYSTEMS:
        unsaid = export(system, late).unsaid
        words = [item.what for item in unsaid]
        assert all(item.reason for item in unsaid)
        assert any("1,234,567 bytes" in word for word in words), system
        assert ("schedule gpipe" in words) == (system != "torchtitan"), system
    own = plan_of([(0, 17), (17, 34)], [[0], [1]], schedule="mine.py:zigzag", schedule_hash="0" * 16)
    for system in SYSTEMS:
        assert "schedule mine.py:zigzag" in [item.what for item in export(system, own).unsaid], system
    assert export("megatron", PLANS["data"]).values["--ddp-bucket-size"] * 2 == 2**20


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (plan_of([(0, 17), (17, 34)], [[0, 1], [2]]), "2, 1 replicas"),
        (plan_of([(0, 34)], [[0, 1, 2]]), "divided unequally among 3"),
        (plan_of([(0, 34)], [[0, 1]], kind="inference"), "for inference"),
        (plan_of([(0, 34)], [[0, 1]], cluster="H100"), "uses 2 devices"),
        (plan_of([(0, 17), (17, 34)], [[0], [1]], schedule="zb-h1"), "follows the schedule zb-h1"),
        (plan_of([(0, 17), (17, 34)], [[0], [0]], schedule="zb-v"), "with one stage on every rank"),
    ],
)
def test_what_cannot_be_expressed_at_all_is_an_error(system, plan, words):
    with pytest.raises(PlanError, match=words):
        export(system, plan)


def test_models_that_a_system_cannot_have():
    stem = ("stem", *(f"blocks.{i}" for i in range(6)), "head")
    net = plan_of([(0, 4), (4, 8)], [[0], [1]], model="resnet-tiny")
    for system in ("megatron", "accelerate"):
        with pytest.raises(PlanError, match="transformers"):
            export(system, net, stem)
    assert export("deepspeed", net, stem).values["train_batch_size"] == 16
    # One stage is data parallelism, which accelerate has for any model.
    assert export("accelerate", plan_of([(0, 8)], [[0, 1]], model="resnet-tiny"), stem).values["num_processes"] == 2
    odd = plan_of([(0, 2), (2, 4)], [[0], [1]], model="mine.py:build")
    for system in ("megatron", "accelerate", "torchtitan"):
        with pytest.raises(PlanError, match="not a row of blocks"):
            export(system, odd, ("encoder.0", "encoder.1", "decoder.0", "head"))
    with pytest.raises(PlanError, match="GPUs"):
        export("accelerate", plan_of([(0, 17), (17, 34)], [[0], [1]], cluster="2xcpu"))
    for system in ("megatron", "torchtitan", "deepspeed"):
        with pytest.raises(PlanError, match="float64"):
            export(system, plan_of([(0, 34)], [[0]], precision="float64"))
    assert "float64" in [
        item.what for item in export("accelerate", plan_of([(0, 34)], [[0]], precision="float64")).unsaid
    ]
    with pytest.raises(PlanError, match="did you mean 'megatron'"):
        export("megatrn", PLANS["data"])


def test_sizes_come_from_the_shape_and_the_plan():
    values = export("megatron", plan_of([(0, 34)], [[0]], model_sizes=(("sequence_length", 512),))).values
    assert (values["--num-layers"], values["--hidden-size"], values["--num-query-groups"]) == (32, 4096, 8)
    assert values["--seq-length"] == 512
    gpt = export("megatron", plan_of([(0, 14)], [[0]], model="gpt2-small"), ()).values
    assert (gpt["--num-layers"], gpt["--vocab-size"]) == (12, 50257)
    assert "--swiglu" not in gpt
    own = plan_of([(0, 6)], [[0]], model="mine.py:build")
    names = ("enter", *(f"blocks.{i}" for i in range(4)), "leave")
    assert export("megatron", own, names).values["--num-layers"] == 4
    assert any("--hidden-size" in item for item in export("megatron", own, names).fill_in)
    assert any("import of base" in item for item in export("torchtitan", own, names).fill_in)


def test_a_shape_file_of_the_users_own(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        'schema = "meshwright/gptshape/1"\nsource = "mine"\nnum_layers = 3\nwidth = 64\nnum_heads = 4\n'
        "vocabulary = 100\ncontext = 32\nbatch_size = 2\nsequence_length = 16\n"
    )
    facts = gather_facts(plan_of([(0, 5)], [[0]], model=str(file)), load_cluster("H100"))
    assert (facts.family, facts.num_blocks) == ("gpt", 3)


def test_hostile_names_stay_inside_comments():
    plan = plan_of([(0, 6)], [[0]], model="mine.py:build\n$(touch x)\nimport os")
    names = ("enter", *(f"blocks.{i}" for i in range(4)), "leave")
    text = export("megatron", plan, names).text
    assert all(line.startswith(("#", "MEGATRON_ARGS=(", "  --", ")")) for line in text.splitlines())
    tree = ast.parse(export("torchtitan", plan, names).text)
    assert [type(node).__name__ for node in tree.body] == ["ImportFrom", "FunctionDef"]


@st.composite
def regular_plans(draw):
    """Any plan that is a grid: cuts anywhere, replicas in either order, all that an exchange may be."""
    num_stages, replicas = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    inner = draw(st.lists(st.integers(1, 33), min_size=num_stages - 1, max_size=num_stages - 1, unique=True))
    edges = [0, *sorted(inner), 34]
    near = [list(range(i * replicas, (i + 1) * replicas)) for i in range(num_stages)]
    far = [list(range(i, num_stages * replicas, num_stages)) for i in range(num_stages)]
    return plan_of(
        list(itertools.pairwise(edges)),
        draw(st.sampled_from([near, far])),
        cluster="4x8xH100",
        count=replicas * draw(st.integers(1, 5)),
        size=draw(st.integers(1, 3)),
        schedule=draw(st.sampled_from(["gpipe", "1f1b"])),
        precision=draw(st.sampled_from(["float32", "mixed", "mixed-bf16-gradients", "bfloat16"])),
        exchange=GradientExchange(bucket_bytes=draw(st.integers(8, 10**9)), overlap=draw(st.booleans())),
    )


@given(plan=regular_plans())
def test_any_regular_plan_is_said_with_documented_names_and_its_own_cut(plan):
    for system in SYSTEMS:
        check_documented(system, export(system, plan))
    sizes = [stage.stop - stage.start for stage in plan.stages]
    layout = export("megatron", plan).values.get("--pipeline-model-parallel-layout")
    if layout is not None:
        counted = [
            part.startswith("E")
            + part.endswith("L")
            + int(m[1] or 1 if (m := re.search(r"t(?:\*(\d+))?", part)) else 0)
            for part in layout.split("|")
        ]
        assert counted == sizes
    elif len(sizes) > 1:
        # Megatron-LM's own cut: equal blocks, with the embedding in the first stage and the head in the last.
        blocks = [size - (i == 0) - (i == len(sizes) - 1) for i, size in enumerate(sizes)]
        assert len(set(blocks)) == 1
    parts = export("torchtitan", plan).values.get("parallelism.module_fqns_per_model_part")
    if parts is not None:
        # The head is two modules there, norm and lm_head.
        assert [len(part) - ("lm_head" in part) for part in parts] == sizes


def read_megatron(text, folder):
    """bash makes words of the text, argparse values."""
    (folder / "args.sh").write_text(text)
    command = f"source {folder}/args.sh; printf '%s\\n' \"${{MEGATRON_ARGS[@]}}\""
    words = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout.splitlines()
    parser = argparse.ArgumentParser(allow_abbrev=False)
    kinds = {"int": int, "float": float, "str": str}
    for option, facts in OPTIONS["megatron"]["options"].items():
        if facts["type"] == "flag":
            parser.add_argument(option, dest=option, action="store_true", default=None)
        else:
            parser.add_argument(option, dest=option, type=kinds[facts["type"]], choices=facts.get("choices"))
    return {key: value for key, value in vars(parser.parse_args(words)).items() if value is not None}


def read_torchtitan(text, folder):
    """What the function assigns; the policy by the module that it is imported from."""
    tree = ast.parse(text)
    function = tree.body[-1]
    assigned = {
        ast.unparse(node.targets[0]).removeprefix("config."): node.value
        for node in function.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute)
    }
    policy = ast.unparse(assigned.pop("activation_checkpoint"))
    names = {"FullAC": "full", "SelectiveAC": "selective"}
    source = "from torchtitan.distributed.activation_checkpoint import "
    lines = list(map(ast.unparse, tree.body))
    imported = [name for name in names if source + name in lines]
    assert policy == (f"{imported[0]}.Config()" if imported else "None")
    return {
        **{name: ast.literal_eval(value) for name, value in assigned.items()},
        "activation_checkpoint": names[imported[0]] if imported else None,
    }


READERS = {
    "megatron": read_megatron,
    "torchtitan": read_torchtitan,
    "deepspeed": lambda text, folder: json.loads(text),
}


@pytest.mark.parametrize("system", READERS)
@pytest.mark.parametrize("name", [*PLANS, *SPLITS])
def test_the_text_holds_the_values(name, system, tmp_path):
    """Each file is read back in its own language: bash and argparse, Python, JSON."""
    settings = export_or_none(system, {**PLANS, **SPLITS}[name])
    assert settings is not None or name in SPLITS
    if settings is not None:
        assert READERS[system](settings.text, tmp_path) == dict(settings.values)


@pytest.mark.parametrize(
    ("precision", "zero", "expected"),
    [
        ("float32", 1, None),
        ("amp", 1, None),
        ("mixed", 1, "fp32"),
        # Without ZeRO it has no other; the export says so.
        ("mixed", 0, "bf16"),
        ("mixed-bf16-gradients", 1, "bf16"),
    ],
)
def test_deepspeed_sums_gradients_in_the_bytes_of_the_plan(precision, zero, expected):
    net = plan_of([(0, 34)], [[0, 1]], precision=precision, exchange=GradientExchange(zero=zero))
    settings = export("deepspeed", net)
    assert settings.values.get("data_types") == (expected and {"grad_accum_dtype": expected})
    unsaid = [item.what for item in settings.unsaid]
    assert ("gradients in float32" in unsaid) == (precision == "mixed" and not zero)
    assert ("autocast to bfloat16" in unsaid) == (precision == "amp")


def test_what_other_systems_do_not_compute_in_is_refused():
    for precision, systems in (("amp", ("megatron", "torchtitan")), ("mixed-float16", ("torchtitan",))):
        for system in systems:
            with pytest.raises(PlanError, match=f"not in {precision}.*--precision mixed"):
                export(system, plan_of([(0, 34)], [[0, 1]], precision=precision))
    half = plan_of([(0, 34)], [[0, 1]], precision="mixed-float16", exchange=GradientExchange(zero=1))
    for system, setting in (("megatron", "--fp16"), ("deepspeed", "fp16")):
        check_documented(system, export(system, half))
        assert export(system, half).values[setting]
    alone = plan_of([(0, 34)], [[0, 1]], precision="amp-float16")
    assert export("accelerate", alone).values["mixed_precision"] == "fp16"
    with pytest.raises(PlanError, match="which has no autocast"):
        export("accelerate", plan_of([(0, 17), (17, 34)], [[0], [1]], precision="amp"))
