"""`run` trains a placement on two processes to what the plan of a single stage gives on one."""

from dataclasses import replace

import pytest
import torch

from meshwright.capture import capture_model
from meshwright.planner import Constraints, place
from meshwright.spec import (
    Optimizer,
    Plan,
    PlanError,
    StagePlan,
    Timeline,
    Workload,
    load_cluster,
    read_document,
    write_document,
)
from meshwright.training import Job, run_plan
from meshwright.zoo import load_model

WORKLOAD = Workload(global_batch=4, optimizer=Optimizer(kind="sgd"))
NUM_STEPS = 3


def graph_of(**options):
    source = load_model("unet-tiny", fake=True)
    kept = {} if options else {"targets": source.targets, "loss": source.loss}
    return capture_model(source.model, source.inputs, verify=False, **kept, **options).graph


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_two_processes_train_as_one(tmp_path, warm_ranks):
    graph = graph_of()
    constraints = Constraints(fixed={graph.layers[1].name: 1, graph.layers[-1].name: 0})
    placement = place(
        graph, load_cluster("2xcpu"), WORKLOAD, constraints=constraints, num_microbatches=2, model="unet-tiny"
    )
    assert placement.num_ranks == 2
    alone = Plan(
        model="unet-tiny",
        graph_hash=graph.content_hash,
        cluster="1xcpu",
        workload=WORKLOAD,
        stages=(StagePlan(start=0, stop=len(graph.layers), ranks=(0,)),),
        num_microbatches=2,
        schedule="gpipe",
    )
    losses, states = [], []
    for name, document in (("placed", placement), ("alone", alone)):
        write_document(document, tmp_path / f"{name}.json")
        job = Job(
            plan=str(tmp_path / f"{name}.json"), num_steps=NUM_STEPS, save_model=str(tmp_path / f"{name}.pt"), seed=3
        )
        result = run_plan(job, tmp_path / name)
        losses.append(result.losses)
        states.append(torch.load(tmp_path / f"{name}.pt"))
        timeline = read_document(Timeline, result.timeline)
        assert timeline.num_ranks == (2 if name == "placed" else 1)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][0] != losses[0][-1]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_a_placement_for_inference_runs_forward(tmp_path):
    graph = graph_of(mode="inference")
    placement = place(graph, load_cluster("1xcpu"), Workload(kind="inference", global_batch=4), model="unet-tiny")
    write_document(placement, tmp_path / "placed.json")
    job = Job(plan=str(tmp_path / "placed.json"), num_steps=2)
    result = run_plan(job, tmp_path / "out")
    assert result.losses == ()
    assert len(result.step_seconds) == 2
    with pytest.raises(PlanError, match=r"is for inference, which does not train\. Leave out --save-model"):
        run_plan(replace(job, save_model=str(tmp_path / "model.pt")), tmp_path / "out")
