"""A user's own schedules: equal ones give equal programs, legal ones run, all others are refused with their line."""

import importlib.util
import threading
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.program import (
    SCHEDULES,
    build,
    build_program,
    compute_orders,
    max_in_flight,
    name_schedule,
    num_active,
    orders,
    picture_schedule,
    with_schedule,
)
from meshwright.spec import (
    Backward,
    DeadlockError,
    Forward,
    Opcode,
    Plan,
    PlanError,
    ScheduleError,
    ScheduleReferenceError,
    StagePlan,
    Tensor,
    Workload,
    content_hash,
    decode_document,
    encode_document,
)
from tests.marks import examples
from tests.program.check import check_program
from tests.program.own import ALL, pipeline, plan_with, write_schedule
from tests.program.test_program import plans


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(ALL)
    return path


# --- what is legal --------------------------------------------------------------------------------


@settings(max_examples=examples(100), deadline=None)
@given(case=plans())
@pytest.mark.parametrize(("own", "named"), [("gpipe", "gpipe"), ("one_f_one_b", "1f1b")])
@pytest.mark.matrix
def test_an_own_schedule_that_equals_a_named_one_gives_the_same_program(mine, own, named, case):
    graph, plan = case
    wanted = build_program(with_schedule(plan, named), graph)
    found = build_program(plan_with(mine, own, plan), graph)
    assert replace(found, schedule=wanted.schedule, plan_hash=wanted.plan_hash) == wanted
    assert found.body == wanted.body
    for stage in range(len(plan.stages)):
        assert max_in_flight(plan_with(mine, own, plan), stage) == max_in_flight(with_schedule(plan, named), stage)


@settings(max_examples=examples(100), deadline=None)
@given(case=plans(), seed=st.integers(0, 10**6))
@pytest.mark.long
def test_ranks_that_disagree_about_the_order_still_keep_every_rule(mine, case, seed):
    graph, plan = case
    program = build_program(plan_with(mine, "shuffled", replace(plan, model=str(seed))), graph)
    check_program(program)


@settings(max_examples=examples(150), deadline=None)
@given(case=plans(), seed=st.integers(0, 10**6))
def test_a_deadlock_is_found_if_and_only_if_the_finished_program_would_stand_still(mine, case, seed):
    graph, plan = case
    plan = plan_with(mine, "mixed", replace(plan, model=str(seed)))
    with mock.patch("meshwright.program.build.play_orders"):
        unchecked = build._build_program.__wrapped__(plan, graph, None, None)
    try:
        check_program(unchecked)
    except DeadlockError:
        with pytest.raises(DeadlockError, match="waits before"):
            build_program(plan, graph)
    else:
        assert build_program(plan, graph) == unchecked


@settings(max_examples=examples(60), deadline=None)
@given(case=plans(), seed=st.integers(0, 10**6), name=st.sampled_from(["mixed", "eager", "shuffled"]))
def test_microbatches_in_flight_are_counted(mine, case, seed, name):
    _, plan = case
    plan = plan_with(mine, name, replace(plan, model=str(seed)))
    for stage, item in enumerate(plan.stages):
        most = 0
        for rank in item.ranks:
            text = "".join("F" if isinstance(each, Forward) else "B" for each in compute_orders(plan)[rank].items)
            most = max(most, *(text[:k].count("F") - text[:k].count("B") for k in range(len(text) + 1)))
        assert max_in_flight(plan, stage) == most


def test_eager_1f1b_is_the_order_that_its_docstring_tells(mine):
    _, plan = pipeline(3, 6)
    found = {
        rank: " ".join(f"{type(item).__name__[0]}{item.microbatch}" for item in order.items)
        for rank, order in enumerate(compute_orders(plan_with(mine, "eager", plan)))
    }
    assert found == {
        0: "F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 B4 B5",
        1: "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        2: "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    }


def test_what_is_yielded_may_hold_numbers_of_numpy_or_come_as_a_list(tmp_path):
    _, plan = pipeline(1, 2)
    path = write_schedule(
        tmp_path,
        """
        import numpy as np

        def listed(plan, rank):
            (stage,) = plan.stages_of(rank)
            return [kind(stage=np.int64(0), microbatch=np.int32(m)) for kind in (Forward, Backward) for m in (0, 1)]
        """,
    )
    (order,) = compute_orders(plan_with(path, "listed", plan))
    assert order.items == (
        Forward(stage=0, microbatch=0),
        Forward(stage=0, microbatch=1),
        Backward(stage=0, microbatch=0),
        Backward(stage=0, microbatch=1),
    )
    assert all(type(item.microbatch) is int for item in order.items)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (2, 3), (4, 8), (5, 5)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_picture_of_named_schedules_has_the_papers_length(name, num_stages, num_microbatches):
    _, plan = pipeline(num_stages, num_microbatches, schedule=name)
    timeline = picture_schedule(plan)
    assert max(timeline.end_ps) == 3 * (num_microbatches + num_stages - 1)
    assert timeline.num_spans == 2 * num_stages * num_microbatches
    assert sum(timeline.end_ps - timeline.start_ps) == 3 * num_stages * num_microbatches


def test_what_nobody_could_look_at_is_not_drawn():
    _, plan = pipeline(2, 125_001)
    with pytest.raises(PlanError, match="500,004 forwards and backwards, but at most 500,000 can be drawn"):
        picture_schedule(plan)


def test_the_picture_of_inference_has_no_backwards(mine):
    _, plan = pipeline(3, 4)
    plan = plan_with(mine, "eager", replace(plan, workload=replace(plan.workload, kind="inference")))
    timeline = picture_schedule(plan)
    assert set(timeline.opcode) == {Opcode.FORWARD}
    assert max(timeline.end_ps) == 4 + 3 - 1


# --- what is not ----------------------------------------------------------------------------------

WRONG = {
    "returns None": ("pass", ScheduleReferenceError, "returned None; expected a generator"),
    "a number": ("return 7", ScheduleReferenceError, "returned an int; expected a generator"),
    "a plain number yielded": ("yield 7", ScheduleError, r"mine\.py:7: yield 7 — on rank 0, an int was"),
    "None yielded": ("yield", ScheduleError, "None was yielded; expected Forward, Backward"),
    "the class": ("yield Forward", ScheduleError, "a type was yielded"),
    "another stage": (
        "yield Forward(stage=stage + 1, microbatch=0)",
        ScheduleError,
        "expected stage 0 and a microbatch",
    ),
    "another microbatch": (
        "yield Forward(stage=stage, microbatch=4)",
        ScheduleError,
        r"microbatch=4\) was yielded; expected stage 0 and a microbatch of 0, 1, 2, 3",
    ),
    "a negative one": ("yield Forward(stage=stage, microbatch=-1)", ScheduleError, "microbatch=-1"),
    "a fraction": ("yield Forward(stage=stage, microbatch=0.5)", ScheduleError, r"microbatch=0\.5"),
    "a huge number": (
        "yield Forward(stage=stage, microbatch=10**6000)",
        ScheduleError,
        "raised ValueError: Exceeds the limit",
    ),
    "a column": (
        "import numpy; yield Forward(stage=numpy.arange(2), microbatch=0)",
        ScheduleError,
        r"microbatch=0\) was yielded; expected stage 0",
    ),
    "a version": ("yield Forward(stage=stage, microbatch=0, version=1)", ScheduleError, "Correct the schedule"),
    "twice": ("while True: yield Forward(stage=stage, microbatch=0)", ScheduleError, "was yielded twice"),
    "backward first": ("yield Backward(stage=stage, microbatch=0)", ScheduleError, "before its forward"),
    "nothing": ("yield from ()", ScheduleError, r"without Forward\(stage=0, microbatch=0\) \(8 of 8 instructions"),
    "no backwards": (
        "yield from [Forward(stage=stage, microbatch=m) for m in range(4)]",
        ScheduleError,
        r"without Backward\(stage=0, microbatch=0\) \(4 of 8",
    ),
    "raises": ("raise ValueError('not\\nthis plan'); yield", ScheduleError, "ValueError: not this plan .*mine.py:7"),
    "divides by zero": (
        "yield 1 / 0",
        ScheduleError,
        r"ZeroDivisionError: division by zero \(.*mine\.py:7: yield 1 / 0",
    ),
    "leaves": ("raise SystemExit(3); yield", ScheduleError, "SystemExit: 3"),
    "interrupts": ("raise KeyboardInterrupt; yield", ScheduleError, "KeyboardInterrupt"),
    "recurses": ("yield from wrong(plan, rank)", ScheduleError, "RecursionError"),
    "asks for itself": (
        "from meshwright.program import max_in_flight; yield max_in_flight(plan, stage)",
        ScheduleError,
        "would call the schedule again, without end. Call num_active",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_schedule_is_refused_with_its_line(tmp_path, case):
    body, error, message = WRONG[case]
    path = write_schedule(tmp_path, f"def wrong(plan, rank, stage=0):\n    {body}\n")
    graph, plan = pipeline(1, 4)
    with pytest.raises(error, match=message):
        build_program(plan_with(path, "wrong", plan), graph)


@pytest.mark.parametrize("body", ["while True:\n        pass\n    yield", "while True:\n        sum(range(10**4))"])
def test_a_schedule_that_never_ends_is_given_up_with_the_line_where_it_stands(tmp_path, monkeypatch, body):
    monkeypatch.setattr(orders, "TIME_LIMIT_S", 0.4)
    path = write_schedule(tmp_path, f"def endless(plan, rank, stage=0):\n    {body}\n")
    _, plan = pipeline(1, 4)
    with pytest.raises(ScheduleReferenceError, match=r"no complete order within 0 s; it was at .*mine\.py:[78]: "):
        compute_orders(plan_with(path, "endless", plan))
    assert not [thread for thread in threading.enumerate() if thread.name == "schedule"]


def test_a_deadlock_names_the_circle_with_its_lines(tmp_path):
    path = write_schedule(
        tmp_path,
        """
        def stuck(plan, rank):
            (stage,) = plan.stages_of(rank)
            order = [0, 1] if stage == 0 else [1, 0]
            for m in order:
                yield Forward(stage=stage, microbatch=m)
                yield Backward(stage=stage, microbatch=m)
        """,
    )
    graph, plan = pipeline(2, 2)
    plan = plan_with(path, "stuck", plan)
    for call in (lambda: build_program(plan, graph), lambda: picture_schedule(plan)):
        with pytest.raises(
            DeadlockError,
            match=r"2 of 2 ranks wait for each other in a cycle.*rank 0 waits before B0\.0 \(.*mine\.py:12\), which "
            r"needs B1\.0 of rank 1; rank 1 waits before F1\.1 \(.*mine\.py:11\), which needs F0\.1 of rank 0",
        ):
            call()


def test_forwards_out_of_order_are_refused_where_statistics_are_written(mine):
    graph, plan = pipeline(2, 6)
    statistics = Tensor(name="mean", shape=(), dtype="float32", role="buffer", storage=len(graph.tensors))
    norm = replace(graph.ops[1], kind="aten.batch_norm.default", inputs=(*graph.ops[1].inputs, len(graph.tensors)))
    graph = replace(graph, tensors=(*graph.tensors, statistics), ops=(graph.ops[0], norm))
    plan = replace(plan, graph_hash=graph.content_hash)
    build_program(plan_with(mine, "gpipe", plan), graph)
    with pytest.raises(ScheduleError, match=r"on stage 1 after that of a later one.*layers\.1 .* running statistics"):
        build_program(plan_with(mine, "shuffled", plan), graph)


# --- references -----------------------------------------------------------------------------------


def test_a_changed_file_is_refused_and_a_new_plan_takes_it(tmp_path):
    path = write_schedule(tmp_path, ALL)
    graph, plan = pipeline(2, 4)
    old = plan_with(path, "eager", plan)
    assert decode_document(Plan, encode_document(old), "plan") == old
    build_program(old, graph)
    path.write_text(path.read_text() + "\n# changed\n")
    with pytest.raises(
        ScheduleReferenceError, match=f"changed since the plan was made: its hash was {old.schedule_hash}"
    ):
        build_program(old, graph)
    new = plan_with(path, "eager", plan)
    assert new.schedule_hash != old.schedule_hash
    assert content_hash(new) != content_hash(old)
    build_program(new, graph)
    path.unlink()
    with pytest.raises(ScheduleReferenceError, match="There is no file"):
        compute_orders(replace(new, num_microbatches=2, workload=replace(new.workload, global_batch=4)))


@pytest.mark.parametrize(
    ("reference", "error", "message"),
    [
        ("1f2b", PlanError, r"no schedule '1f2b' \(did you mean '1f1b'\?\)"),
        ("", PlanError, "no schedule ''"),
        ("gpipe.txt:x", PlanError, "no schedule"),
        ("{folder}/mine.py", ScheduleReferenceError, "names a file but no function in it"),
        ("{folder}/mien.py:eager", ScheduleReferenceError, r"no file .*mien\.py' \(did you mean 'mine\.py'\?\)"),
        ("{folder}/mine.py:egaer", ScheduleReferenceError, r"no function 'egaer' \(did you mean 'eager'\?\)"),
        ("{folder}/mine.py:", ScheduleReferenceError, "no function ''"),
        ("{folder}/mine.py:HEAD", ScheduleReferenceError, "no function 'HEAD'"),
        ("{folder}/mine.py:short", ScheduleReferenceError, r"mine\.py:1: short\(plan\) cannot be called with two"),
        ("{folder}/broken.py:x", ScheduleReferenceError, r"Loading .*broken\.py raised SyntaxError.*broken\.py:1"),
        (
            "{folder}/raises.py:x",
            ScheduleReferenceError,
            r"raised ModuleNotFoundError: .*\(.*raises\.py:1: from nowhere",
        ),
        ("{folder}/folder.py:x", ScheduleReferenceError, "There is no file"),
        ("{folder}/nul\0.py:x", ScheduleReferenceError, "There is no file"),
    ],
)
def test_references_that_lead_nowhere(tmp_path, reference, error, message):
    (tmp_path / "mine.py").write_text("def short(plan): yield\ndef eager(plan, rank): yield\nHEAD = 1\n")
    (tmp_path / "broken.py").write_text("def x(:\n")
    (tmp_path / "raises.py").write_text("from nowhere.at_all import x\n")
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(error, match=message):
        name_schedule(reference.format(folder=tmp_path))


def test_a_file_may_import_its_neighbours(tmp_path):
    (tmp_path / "own_parts.py").write_text(ALL)
    path = write_schedule(tmp_path, "from own_parts import eager as imported\n")
    graph, plan = pipeline(3, 6)
    build_program(plan_with(path, "imported", plan), graph)


def test_functions_are_named_by_their_files(tmp_path, monkeypatch):
    path = write_schedule(tmp_path, ALL, "own_functions.py")
    spec = importlib.util.spec_from_file_location("own_functions", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _, plan = pipeline(2, 4)
    by_function, by_reference = with_schedule(plan, module.eager), plan_with(path, "eager", plan)
    assert by_function == by_reference
    monkeypatch.chdir(tmp_path)
    assert with_schedule(plan, module.eager).schedule == "own_functions.py:eager"
    assert [with_schedule(plan, schedule).schedule for schedule in SCHEDULES.values()] == list(SCHEDULES)
    main = lambda plan, rank: iter(())
    main.__name__ = main.__qualname__ = "main"
    main.__module__ = "__main__"
    for function in (lambda plan, rank: iter(()), main, dict, print, object()):
        with pytest.raises(ScheduleReferenceError, match=r"Expected a function at the top level of another file"):
            with_schedule(plan, function)


def test_the_number_that_1f1b_keeps():
    _, plan = pipeline(4, 8)
    assert [num_active(plan, stage) for stage in range(4)] == [4, 3, 2, 1]


DRAWN = """
import random
from meshwright.spec import Backward, Forward
def drawn(plan, rank):
    (stage,) = plan.stages_of(rank)
    mine = [m for m in range(plan.num_microbatches) if plan.stages[stage].rank_of(m) == rank]
    random.shuffle(mine)
    yield from (Forward(stage=stage, microbatch=m) for m in mine)
    yield from (Backward(stage=stage, microbatch=m) for m in mine)
"""


def test_an_order_that_is_drawn_anew_is_refused(tmp_path):
    (tmp_path / "drawn.py").write_text(DRAWN)
    plan = Plan(
        model="",
        graph_hash="0" * 16,
        cluster="",
        workload=Workload(global_batch=64),
        stages=(StagePlan(start=0, stop=1, ranks=(0,)),),
        num_microbatches=64,
    )
    with pytest.raises(ScheduleReferenceError, match="gave two orders for rank 0 when it was called twice"):
        compute_orders(with_schedule(plan, f"{tmp_path / 'drawn.py'}:drawn"))
    (tmp_path / "drawn.py").write_text(DRAWN.replace("random.shuffle", "random.Random(plan.graph_hash).shuffle"))
    assert len(compute_orders(with_schedule(plan, f"{tmp_path / 'drawn.py'}:drawn"))[0].items) == 128
