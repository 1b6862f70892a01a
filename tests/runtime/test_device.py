"""On a CUDA device a run has the losses of one process on processors."""

import pytest

from meshwright.spec import Plan, StagePlan, Timeline, Workload, load_shipped_graph, read_document, write_document
from meshwright.training import Job, check_losses, run_plan

pytestmark = [pytest.mark.gpu, pytest.mark.distributed, pytest.mark.timeout(300)]


def job_of(folder, precision="float32"):
    graph = load_shipped_graph("gpt-tiny")
    plan = Plan(
        model="gpt-tiny",
        graph_hash=graph.content_hash,
        cluster="1xcpu",
        workload=Workload(global_batch=4, precision=precision),
        stages=(StagePlan(start=0, stop=len(graph.layers), ranks=(0,)),),
        num_microbatches=2,
    )
    return Job(plan=str(write_document(plan, folder / "plan.json")), num_steps=6, device="cuda")


def test_losses_are_those_of_one_process(tmp_path):
    job = job_of(tmp_path)
    result = run_plan(job, tmp_path / "out")
    check_losses(job, result)  # raises otherwise
    timeline = read_document(Timeline, result.timeline)
    assert 0 < timeline.peak_memory_bytes[0] <= timeline.reserved_memory_bytes[0]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return run_plan(job_of(folder), folder / "run").losses


@pytest.mark.parametrize("precision", ["amp", "amp-float16", "mixed", "mixed-bf16-gradients", "bfloat16"])
def test_in_two_bytes_it_learns_as_in_four(tmp_path, plain, precision):
    half = run_plan(job_of(tmp_path, precision), tmp_path / "half")
    assert half.losses == pytest.approx(plain, rel=2e-2)
    assert half.losses[-1] < half.losses[0]
