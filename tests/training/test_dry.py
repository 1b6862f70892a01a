"""Dry runs: what one process of many issues is what the program and the local graph say, and a difference is told."""

from collections import Counter

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.program.collective_expansion import Expansion
from meshwright.spec import (
    GradientExchange,
    Offload,
    Plan,
    PlanError,
    RunError,
    Sharding,
    StagePlan,
    Workload,
    load_shipped_graph,
    recompute_choices,
    write_document,
)
from meshwright.training import Job, dry_run
from tests.marks import left_to_ci


def job_of(folder, model, stages, *, size=1, num_microbatches=4, again=False, precision="float32", **options):
    graph = load_shipped_graph(model)
    count, sharding = len(graph.layers), options.get("sharding", Sharding())
    bounds = [count * place // len(stages) for place in range(len(stages) + 1)]
    plan = Plan(
        model=model,
        graph_hash=graph.content_hash,
        cluster="",
        workload=Workload(global_batch=size * num_microbatches * sharding.expert, precision=precision),
        stages=tuple(
            StagePlan(start=start, stop=stop, ranks=tuple(ranks))
            for start, stop, ranks in zip(bounds[:-1], bounds[1:], stages, strict=True)
        ),
        num_microbatches=num_microbatches,
        recompute=recompute_choices(graph)["full"].ranges if again else (),
        **options,
    )
    return Job(plan=str(write_document(plan, folder / "plan.json")), num_steps=1)


TWO = ((0, 1), (2, 3))
FOURS = ((0, 1, 2, 3), (4, 5, 6, 7))
TENSOR = Sharding(tensor=2, sequence_parallel=True)
SAVED = Offload(activations="host")
ON_DRIVES, AWAY = Offload(optimizer="nvme"), Offload(optimizer="host", parameters="host")


@pytest.mark.parametrize(
    ("model", "stages", "options", "process", "kinds"),
    [
        ("gpt-tiny", TWO, {}, 3, {"send", "receive", "all_reduce"}),
        ("gpt-tiny", ((0,), (1,)), {"schedule": "gpipe", "sharding": TENSOR, "again": True}, 2, {"all_gather"}),
        ("llama-tiny", TWO, {"exchange": GradientExchange(zero=1), "sharding": TENSOR}, 6, {"reduce_scatter"}),
        (
            "llama-tiny",
            FOURS,
            {"exchange": GradientExchange(zero=3, shard_size=2), "num_microbatches": 8},
            6,
            {"all_reduce"},
        ),
        *left_to_ci(
            ("llama-tiny", FOURS, {"exchange": GradientExchange(zero=1, shard_size=2)}, 1, {"all_reduce"}),
            (
                "gpt-tiny",
                FOURS,
                {
                    "exchange": GradientExchange(zero=2, shard_size=2),
                    "num_microbatches": 12,
                    "sharding": TENSOR,
                    "schedule": "gpipe",
                },
                11,
                {"all_reduce"},
            ),
            ("llama-tiny", TWO, {"exchange": GradientExchange(zero=2)}, 0, {"reduce_scatter", "all_gather"}),
            (
                "gpt-tiny",
                (*TWO, *TWO),
                {"schedule": "interleaved", "exchange": GradientExchange(zero=3)},
                1,
                {"all_gather"},
            ),
            ("llama-tiny", TWO, {"schedule": "pipedream"}, 1, {"send", "receive"}),
            ("gpt-tiny", ((0, 1),), {"sharding": Sharding(context=2)}, 1, {"all_reduce"}),
            ("mixtral-tiny", ((0, 1),), {"sharding": Sharding(expert=2)}, 3, {"all_to_all", "all_reduce"}),
            ("gpt-tiny", TWO, {"exchange": GradientExchange(zero=1), "offload": ON_DRIVES}, 1, {"reduce_scatter"}),
            ("llama-tiny", TWO, {"exchange": GradientExchange(zero=3), "offload": AWAY}, 1, {"reduce_scatter"}),
            ("gpt-tiny", TWO, {"exchange": GradientExchange(zero=3), "offload": SAVED}, 1, {"reduce_scatter"}),
        ),
    ],
)
def test_a_process_issues_what_is_predicted(tmp_path, model, stages, options, process, kinds):
    job = job_of(tmp_path, model, stages, **options)
    found = dry_run(job, process)
    assert kinds <= {call.kind for call in (*found.issued, *found.inside)}
    assert sum(row["calls"] for row in found.rows()) == len(found.issued) + len(found.inside)
    assert not dist.is_initialized()


@pytest.mark.matrix
@pytest.mark.parametrize("precision", ["mixed", "amp", "amp-float16", "bfloat16", "mixed-bf16-gradients"])
def test_a_precision_exchanges_the_bytes_that_are_predicted(precision, tmp_path):
    for stages, options in (
        (((0,), (1,)), {}),
        (((0, 1),), {"exchange": GradientExchange(zero=1)}),
        (((0, 1),), {"exchange": GradientExchange(zero=3)}),
        (((0, 1, 2, 3),), {"exchange": GradientExchange(zero=1, shard_size=2)}),
        (((0, 1, 2, 3),), {"exchange": GradientExchange(zero=3, shard_size=2)}),
        (((0,),), {"sharding": Sharding(tensor=2)}),
    ):
        dry_run(job_of(tmp_path, "gpt-tiny", stages, precision=precision, **options), 0)


@pytest.mark.long
def test_one_of_256_processes(tmp_path):
    """Pipeline 4 × data 8 × tensor 8."""
    stages = tuple(tuple(range(8 * place, 8 * place + 8)) for place in range(4))
    sharding = Sharding(tensor=8, sequence_parallel=True)
    found = dry_run(job_of(tmp_path, "llama3-8b", stages, num_microbatches=32, sharding=sharding), 137)
    assert (found.num_processes, found.stages) == (256, (2,))
    # Of 32 microbatches each of 8 replicas has 4, and they come from and go to processes at its own place.
    assert Counter((call.kind, call.peer % 8) for call in found.issued if call.peer >= 0) == {
        ("send", 1): 8,
        ("receive", 1): 8,
    }
    assert {call.num_processes for call in found.inside} == {8}
    assert len(found.inside) == 272


@pytest.mark.long
def test_a_difference_is_told(tmp_path, monkeypatch):
    job = job_of(tmp_path, "gpt-tiny", ((0,),), sharding=Sharding(tensor=2))
    expand = Expansion.expand
    monkeypatch.setattr(Expansion, "expand", lambda self, item: expand(self, item)[1:])
    words = r"Process 1 communicates inside forwards, backwards and updates .* were predicted; number 8 is"
    with pytest.raises(RunError, match=words):
        dry_run(job, 1)
    monkeypatch.undo()
    monkeypatch.setattr("meshwright.training.dry.gradient_buckets", lambda *_: ())
    job = job_of(tmp_path, "gpt-tiny", ((0, 1),))
    words = r"Process 0 issues communication 1 times, but 0 were predicted; number 0 is Communication\("
    with pytest.raises(RunError, match=words):
        dry_run(job, 0)


def test_what_cannot_be_run_dry_is_refused(tmp_path):
    job = job_of(tmp_path, "gpt-tiny", TWO)
    with pytest.raises(PlanError, match="Process 4 was given; expected a number from 0 to 3"):
        dry_run(job, 4)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        with pytest.raises(RunError, match="already has a process group"):
            dry_run(job, 0)
    finally:
        dist.destroy_process_group()
