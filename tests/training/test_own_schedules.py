"""Real runs under own schedules: the losses are those of 1F1B, and a deadlock never starts."""

import pytest

from meshwright.program import with_schedule
from meshwright.spec import (
    Plan,
    RunError,
    StagePlan,
    Timeline,
    Workload,
    load_shipped_graph,
    read_document,
    write_document,
)
from meshwright.training import Job, run_plan
from tests.processes import ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


@pytest.fixture
def run(tmp_path, monkeypatch, warm_ranks):
    monkeypatch.chdir(ROOT)  # where the reference of the schedule is found, by the ranks as well
    graph = load_shipped_graph("gpt-tiny")

    def run_under(schedule):
        plan = Plan(
            model="gpt-tiny",
            graph_hash=graph.content_hash,
            cluster="2xcpu",
            workload=Workload(global_batch=12),
            stages=(StagePlan(start=0, stop=3, ranks=(0,)), StagePlan(start=3, stop=6, ranks=(1,))),
            num_microbatches=6,
        )
        path = write_document(with_schedule(plan, schedule), tmp_path / "plan.json")
        return run_plan(Job(plan=str(path), num_steps=3, num_recorded_steps=1), tmp_path / schedule.rpartition(":")[2])

    return run_under


def computed(result):
    """Per rank, what its compute stream ran, in order of time."""
    timeline = read_document(Timeline, result.timeline)
    order = sorted(range(timeline.num_spans), key=lambda i: timeline.start_ps[i])
    tracks = [timeline.tracks[timeline.track[i]] for i in order]
    return {
        rank: " ".join(
            f"{'FB'[timeline.opcode[i]]}{timeline.microbatch[i]}"
            for i, track in zip(order, tracks, strict=True)
            if track.rank == rank and track.name == "compute" and timeline.opcode[i] < 2
        )
        for rank in range(timeline.num_ranks)
    }


@pytest.mark.long
def test_the_losses_are_those_of_1f1b_and_the_order_is_the_own_one(run):
    named = run("1f1b")
    eager = run("tests/runtime/schedules.py:eager")
    crossed = run("tests/runtime/schedules.py:crossed")
    # The same additions in the same order; then the same ones in another order, in float32.
    assert eager.losses == named.losses
    assert crossed.losses == pytest.approx(named.losses, rel=1e-5)
    assert named.losses[-1] < named.losses[0]
    assert computed(named) == {0: "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5", 1: "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5"}
    assert computed(eager) == {0: "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5", 1: "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5"}
    assert computed(crossed) == {0: "F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5", 1: "F5 B5 F4 B4 F3 B3 F2 B2 F1 B1 F0 B0"}


@pytest.mark.long
def test_a_deadlock_is_told_by_the_rank_that_finds_it_and_nothing_trains(run, tmp_path):
    with pytest.raises(RunError, match=r"Rank \d failed: .*schedules\.py:stuck can never finish") as caught:
        run("tests/runtime/schedules.py:stuck")
    assert "Traceback" not in str(caught.value)
    assert not (tmp_path / "stuck").exists()
