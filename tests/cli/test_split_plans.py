"""Plans that split ops, share states out or compute again, from the command line: planned, simulated, refused."""

import json
from dataclasses import replace

import pytest

from meshwright.spec import Plan, load_shipped_graph, read_document, read_recompute, write_document

PLAN = ["plan", "gpt-tiny", "--cluster", "2x4xA100", "--batch", "16", "--precision", "bfloat16", "--json"]


@pytest.mark.parametrize(
    "options",
    [
        ["--tensor", 2],
        ["--tensor", 4, "--sequence-parallel", "--recompute", "full"],
        ["--context", 2, "--zero", 1],
        ["--zero", 2, "--recompute", "0:2"],
        ["--tensor", 2, "--zero", 3, "--recompute", "1:3"],
    ],
)
def test_a_split_plan_is_simulated_as_it_was_planned(run, options, tmp_path):
    path = tmp_path / "plan.json"
    planned = json.loads(run(*PLAN, *options, "--out", path, code=0)[1])["plans"][0]
    plan = read_document(Plan, path)
    given = dict(zip(options[::2], options[1::2], strict=False)) if "--sequence-parallel" not in options else {}
    if given:
        assert plan.sharding.tensor == given.get("--tensor", 1)
        assert plan.exchange.zero == given.get("--zero", 0)
    assert plan.num_devices == 8
    found = json.loads(run("simulate", path, "--json", code=0)[1])
    assert found["steady"]["step_time_s"] == pytest.approx(planned["step_time_s"], rel=1e-9)
    assert ("teams" in found) == (plan.sharding.width > 1)


@pytest.mark.parametrize(
    ("model", "options"),
    [("mixtral-tiny", []), ("dlrm-tiny", ["--placement", "embeddings.*=expert:output1", "--schedule", "gpipe"])],
)
def test_experts_and_tables_are_laid_out(run, model, options, tmp_path):
    path, page = tmp_path / "plan.json", tmp_path / "page.html"
    _, out, _ = run(*["plan", model, *PLAN[2:], "--expert", 2, *options], "--out", path, "--html", page, code=0)
    planned = json.loads(out)["plans"][0]
    plan = read_document(Plan, path)
    assert (plan.sharding.expert, plan.num_devices, plan.workload.global_batch) == (2, 8, 16)
    assert planned["microbatch_size"] == plan.microbatch_size == 16 // 2 // plan.num_microbatches
    assert planned["samples_per_s"] == pytest.approx(16 / planned["step_time_s"])
    assert "16 samples per step" in page.read_text()
    found = json.loads(run("simulate", path, "--json", "--html", page, code=0)[1])["steady"]
    assert found["step_time_s"] == pytest.approx(planned["step_time_s"], rel=1e-9)
    assert found["samples_per_s"] == pytest.approx(planned["samples_per_s"], rel=1e-9)
    assert plan.graph_hash in page.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--expert", 2], "has no experts: no grouped product, and no batched product with a matrix per expert"),
        (["--tensor", 2, "--placement", "head=expert:output1"], "axis, which has size 1"),
        (["--tensor", 2, "--placement", "head"], "expected OP=AXIS:inputN"),
        (["--tensor", 2, "--placement", "hed=tensor"], "did you mean 'head'"),
        (["--expert", 3, "--ranks", 6], "for expert = 3 ranks, which compute different samples"),
        (["--tensor", 3], "divide a node, or cover whole nodes"),
        (["--tensor", 8], "which has 4 heads; expected a divisor of 4"),
        (["--tensor", 2, "--ranks", 3], "expected a multiple"),
        (["--recompute", "ful"], "did you mean 'full'"),
        (["--recompute", "every-9"], "has no 9 repeated blocks"),
        (["--recompute", "keep=aten.lineax"], "did you mean 'aten.linear'"),
        (["--recompute", "full@0,op@1"], "Give --stages 2 or more"),
        (["--recompute", "full@2", "--stages", 2], "Give --stages 3 or more"),
        (["--recompute", "3:9"], "the graph has layers 0 to"),
        (["--recompute", "2:2"], "start below stop"),
        (["--schedule", "pipedream", "--zero", 1], "asynchronous schedule"),
    ],
)
def test_what_cannot_be_split_is_refused(run, options, message):
    code, _, error = run(*PLAN, *options)
    assert code != 0
    assert message in error


@pytest.mark.long
def test_what_a_split_plan_cannot_do_is_not_run(run, tmp_path):
    path = tmp_path / "layout"
    run(*PLAN[:-1], "--tensor", 2, "--out", path, code=0)
    plan = read_document(Plan, path / "plan.json")
    write_document(replace(plan, exchange=replace(plan.exchange, algorithm="ring")), path / "ring.json")
    code, _, error = run("run", path / "ring.json")
    assert code != 0
    assert "which can only be simulated" in error


@pytest.mark.long
def test_a_split_plan_comes_with_the_script_that_starts_it(run, tmp_path):
    path = tmp_path / "layout"
    run(*PLAN[:-1], "--tensor", 2, "--out", path, code=0)
    plan = read_document(Plan, path / "plan.json")
    assert plan.num_devices == 2 * plan.num_ranks
    script = (path / "launch.sh").read_text()
    assert "--nnodes=2" in script
    assert "--nproc-per-node=4" in script


def test_a_split_plan_is_said_in_other_words_or_refused(run, tmp_path):
    path = tmp_path / "plan.json"
    options = ["--stages", 1, "--tensor", 2, "--context", 2, "--zero", 1, "--recompute", "full"]
    assert run(*PLAN, *options, "--out", path)[0] == 0
    _, out, _ = run("show", path, "--as", "megatron", code=0)
    for line in (
        "--tensor-model-parallel-size 2",
        "--context-parallel-size 2",
        "--use-distributed-optimizer",
        "--recompute-granularity full",
    ):
        assert line in out
    # What runs again is in the graph, which this system needs for nothing else.
    found = json.loads(run("show", path, "--as", "accelerate", "--json", code=0)[1])["values"]
    assert found["num_processes"] == 8
    assert found["megatron_lm_config"]["megatron_lm_recompute_granularity"] == "full"
    assert "Plan without --context" in run("show", path, "--as", "deepspeed", code=1)[2]
    assert "tensor 2, context 2 (keys and values in a ring)" in run("show", path, "--as", "torch-csv", code=0)[2]


def test_stages_may_compute_different_parts_again(run, tmp_path):
    path = tmp_path / "plan.json"
    assert "full@0,op@1" in run(*PLAN, "--stages", 2, "--recompute", "full@0,op@1", "--out", path, code=0)[1]
    plan, graph = read_document(Plan, path), load_shipped_graph("gpt-tiny")
    assert (plan.recompute, plan.keeps) == read_recompute(graph, "full@0,op@1", plan.bounds)
    cut = graph.layers[plan.stages[1].start].start
    assert plan.keeps
    assert min(plan.keeps) >= cut


def test_a_team_that_the_cluster_has_not_is_refused(run):
    code, _, error = run("plan", "gpt-tiny", "--cluster", "8xA100", "--tensor", 16)
    assert code != 0
    assert "Teams of 16 devices" in error


def test_experts_that_do_not_divide_are_refused_before_a_mixture_is_captured(run, tmp_path, monkeypatch):
    config = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 8}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))

    def capture(*_, **__):
        raise AssertionError("nothing is captured")

    monkeypatch.setattr("meshwright.cli.model_arguments.capture_reference", capture)
    for size, words in ((3, "has 8 experts; expected a divisor of 8"), (16, "fewer experts than ranks: 8")):
        _, _, error = run("plan", path, "--cluster", "2x8xH100", "--expert", size, code=1)
        assert "num_local_experts" in error
        assert words in " ".join(error.split())
