"""Plans for inference: forward passes in pipelines, replicas and teams are the model's own."""

from dataclasses import replace

import pytest

from meshwright.spec import (
    Opcode,
    Plan,
    PlanError,
    StagePlan,
    Timeline,
    Workload,
    load_shipped_graph,
    read_document,
    write_document,
)
from meshwright.training import Job, run_plan
from meshwright.training.job import capture_fake
from tests.rank_results import read_results

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return read_results("tests.training.inference_worker", 2, tmp_path_factory.mktemp("inference"))


@pytest.mark.long
@pytest.mark.parametrize("name", ["pipeline", "replicas", "both"])
def test_outputs_are_those_of_the_model(results, name):
    ranks = results[name]
    assert max(rank["worst"] for rank in ranks) <= 1e-12
    rows = {"pipeline": [0, 8], "replicas": [4, 4], "both": [4, 4]}[name]
    assert [rank["shapes"] for rank in ranks] == [[[n, 8], [n, 3]] if n else [] for n in rows]
    assert all(rank["losses"] == [] for rank in ranks)
    assert all("for inference, which trains nothing. Call `infer`" in rank["told"] for rank in ranks)


@pytest.mark.long
def test_a_team_that_would_return_parts_is_refused(results):
    assert "a part of 'add" in results["team"]
    assert "which the model returns. Place the op that makes it whole (`--placement 'add" in results["team"]


def plan_file(folder):
    shown = load_shipped_graph("gpt-tiny")
    plan = Plan(
        model="gpt-tiny",
        graph_hash=shown.content_hash,
        cluster="2xcpu",
        workload=Workload(kind="inference", global_batch=8),
        stages=(StagePlan(start=0, stop=3, ranks=(0,)), StagePlan(start=3, stop=len(shown.layers), ranks=(1,))),
        num_microbatches=4,
        schedule="gpipe",
    )
    graph = capture_fake(plan)[1].graph
    last = replace(plan.stages[1], stop=len(graph.layers))
    plan = replace(plan, graph_hash=graph.content_hash, stages=(plan.stages[0], last))
    return str(write_document(plan, folder / "plan.json"))


@pytest.mark.long
def test_the_ready_job_runs_forward_alone(tmp_path, warm_ranks):
    result = run_plan(Job(plan=plan_file(tmp_path), num_steps=6), tmp_path / "out")
    assert result.losses == ()
    assert len(result.step_seconds) == 6
    timeline = read_document(Timeline, result.timeline)
    kinds = {Opcode(code) for code in timeline.opcode.tolist()}
    assert kinds == {Opcode.FORWARD, Opcode.SEND_ACTIVATION, Opcode.RECEIVE_ACTIVATION}


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"clip_norm": 1.0}, "--clip-norm"),
        ({"checkpoint": "kept"}, "--checkpoint"),
        ({"learning_rate": 0.1}, "--learn"),
    ],
)
def test_what_inference_has_not_is_refused(tmp_path, options, name):
    with pytest.raises(PlanError, match=rf"does not train\. Leave out {name}"):
        run_plan(Job(plan=plan_file(tmp_path), num_steps=2, **options), tmp_path / "out")
