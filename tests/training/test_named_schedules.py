"""Real runs under named schedules: the losses are those of 1F1B where they flush, the order is the program's."""

import pytest

from meshwright.program import build_program
from meshwright.spec import Plan, StagePlan, Timeline, Workload, load_shipped_graph, read_document, write_document
from meshwright.spec.instructions import COMPUTATIONS
from meshwright.training import Job, run_plan
from tests.processes import ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

GRAPH = load_shipped_graph("gpt-tiny")
TWO, FOUR = (0, 3, 6), (0, 2, 3, 4, 6)
LAYOUTS = {
    "1f1b": (TWO, [(0,), (1,)]),
    "zb-h1": (TWO, [(0,), (1,)]),
    "zb-h2": (TWO, [(0,), (1,)]),
    "interleaved": (FOUR, [(0,), (1,)] * 2),
    "looped-bfs": (FOUR, [(0,), (1,)] * 2),
    "zb-v": (FOUR, [(0,), (1,), (1,), (0,)]),
    "dualpipe-v": (FOUR, [(0,), (1,), (1,), (0,)]),
    "dualpipe": (TWO, [(0, 1), (1, 0)]),
}
# One with several stages on a rank and backwards in two parts is always run.
ALWAYS = "zb-v"


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """Runs by their schedules, and where they lie."""
    return {}, tmp_path_factory.mktemp("named")


@pytest.fixture
def run(known, warm_ranks, monkeypatch):
    found, folder = known
    monkeypatch.chdir(ROOT)

    def run_under(schedule, model="gpt-tiny", num_steps=3):
        if schedule not in found:
            graph = load_shipped_graph(model)
            edges, ranks = LAYOUTS.get(schedule, (TWO, [(0,), (1,)]))
            plan = Plan(
                model=model,
                graph_hash=graph.content_hash,
                cluster="2xcpu",
                workload=Workload(global_batch=16),
                stages=tuple(
                    StagePlan(start=start, stop=stop, ranks=own)
                    for start, stop, own in zip(edges, edges[1:], ranks, strict=False)
                ),
                num_microbatches=8,
                schedule=schedule,
            )
            path = write_document(plan, folder / f"{schedule}.json")
            job = Job(plan=str(path), num_steps=num_steps, num_recorded_steps=1)
            found[schedule] = plan, run_plan(job, folder / schedule)
        return found[schedule]

    return run_under


def issued(timeline, rank):
    """What the compute stream of a rank ran, in order of time: opcode, stage, microbatch."""
    order = sorted(range(timeline.num_spans), key=lambda i: timeline.start_ps[i])
    found = []
    for i in order:
        track = timeline.tracks[timeline.track[i]]
        if track.rank == rank and track.name == "compute" and timeline.opcode[i] in COMPUTATIONS:
            found.append((int(timeline.opcode[i]), int(timeline.stage[i]), int(timeline.microbatch[i])))
    return found


def asked(program, rank):
    """The same of a program."""
    section = program.body
    (stream,) = (s for s in program.streams_of(rank) if program.streams[s].name == "compute")
    rows = [i for i in section.stream_range(stream) if section.opcode[i] in COMPUTATIONS]
    return [(int(section.opcode[i]), int(section.stage[i]), int(section.microbatch[i])) for i in rows]


@pytest.mark.long
@pytest.mark.parametrize(
    "schedule",
    [pytest.param(name, marks=[] if name == ALWAYS else pytest.mark.slow) for name in LAYOUTS if name != "1f1b"],
)
def test_losses_are_those_of_1f1b_and_the_order_is_the_programs(run, schedule):
    _, usual = run("1f1b")
    plan, result = run(schedule)
    assert result.losses == pytest.approx(usual.losses, rel=1e-5)
    assert usual.losses[-1] < usual.losses[0]
    timeline, program = read_document(Timeline, result.timeline), build_program(plan, GRAPH)
    for rank in range(2):
        assert issued(timeline, rank) == asked(program, rank)


@pytest.mark.long
@pytest.mark.parametrize(
    "schedule", ["pipedream", *(pytest.param(name, marks=pytest.mark.slow) for name in ("pipedream-2bw", "hetpipe"))]
)
def test_a_schedule_that_never_flushes_trains_and_keeps_the_programs_order(run, schedule):
    plan, result = run(schedule, "llama-tiny", 6)
    assert len(result.losses) == 6
    assert result.losses[-1] < result.losses[0]
    timeline, program = read_document(Timeline, result.timeline), build_program(plan, load_shipped_graph("llama-tiny"))
    for rank in range(2):
        found, wanted = issued(timeline, rank), asked(program, rank)
        assert found == wanted
