"""`run --check`: losses of a run beside those of one process, and what is told when they differ."""

from dataclasses import replace

import pytest

from meshwright.spec import (
    GradientExchange,
    Plan,
    PlanError,
    RunError,
    Sharding,
    StagePlan,
    Workload,
    load_shipped_graph,
    write_document,
)
from meshwright.training import Job, check_losses, refuse_unchecked, run_plan
from tests.marks import left_to_ci

pytestmark = pytest.mark.distributed


def job_of(folder, *, ranks=((0,), (1,)), schedule="1f1b", sharding=None, zero=0, precision="float32", **options):
    graph = load_shipped_graph("gpt-tiny")
    count = len(graph.layers)
    bounds = [count * place // len(ranks) for place in range(len(ranks) + 1)]
    plan = Plan(
        model="gpt-tiny",
        graph_hash=graph.content_hash,
        cluster="2xcpu",
        workload=Workload(global_batch=4, precision=precision),
        stages=tuple(StagePlan(start=bounds[i], stop=bounds[i + 1], ranks=own) for i, own in enumerate(ranks)),
        num_microbatches=4,
        schedule=schedule,
        sharding=sharding or Sharding(),
        exchange=GradientExchange(zero=zero),
    )
    return Job(plan=str(write_document(plan, folder / "plan.json")), num_steps=4, **options)


@pytest.mark.parametrize(
    "options",
    [
        *left_to_ci({"schedule": "zb-h1", "clip_norm": 0.5}, {"ranks": ((0, 1),), "zero": 3}),
        {"ranks": ((0,),), "sharding": Sharding(tensor=2)},
    ],
    ids=["zb-h1, clipped", "zero 3", "tensor"],
)
@pytest.mark.long
def test_losses_of_a_run_are_those_of_one_process(tmp_path, options, warm_ranks):
    job = job_of(tmp_path, **options)
    refuse_unchecked(job)
    result = run_plan(job, tmp_path / "out")
    assert check_losses(job, result) < 1e-4
    late = replace(result, losses=(*result.losses[:2], result.losses[2] * 1.01, result.losses[3]))
    words = r"Step 3 had loss .* in the run and .* in one process: a relative difference of 0\.01,"
    with pytest.raises(RunError, match=words):
        check_losses(job, late)


def test_what_one_process_would_not_have_is_refused(tmp_path):
    for options, words in (
        ({"schedule": "pipedream"}, "weights are older"),
        ({"precision": "amp"}, "for precision amp, in which products"),
        ({"resume": True, "checkpoint": "kept"}, "continues from a checkpoint"),
    ):
        with pytest.raises(PlanError, match=words):
            refuse_unchecked(job_of(tmp_path, **options))
