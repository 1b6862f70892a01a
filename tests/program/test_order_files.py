"""Files of orders: to the byte those of torch, read back exactly, and refused with line and action."""

import csv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed.pipelining.schedules as torch_schedules
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.program import (
    build_program,
    compute_orders,
    find_schedule,
    name_schedule,
    picture_schedule,
    with_schedule,
    write_orders,
)
from meshwright.program.order_files import parse_lines
from meshwright.spec import (
    DeadlockError,
    Opcode,
    Plan,
    PlanError,
    ScheduleError,
    ScheduleReferenceError,
    decode_document,
    encode_document,
)
from tests.graphs import chain_graph, even_bounds, make_plan
from tests.marks import examples
from tests.program.check import check_program
from tests.program.layouts import LAYOUTS, plan_of
from tests.program.own import pipeline
from tests.program.test_schedules import layouts
from tests.program.torch_schedules import torch_actions


def write(plan, folder, name="orders.csv"):
    """The plan under a file of its own orders."""
    path = folder / name
    path.write_bytes(write_orders(plan, compute_orders(plan)).text.encode())
    return with_schedule(plan, str(path))


def torch_runtime(num_ranks, num_stages, num_microbatches):
    """torch's runtime without ranks, to load and dump with."""
    runtime = object.__new__(torch_schedules._PipelineScheduleRuntime)
    runtime.__dict__ |= {
        "pipeline_order": {},
        "pp_group_size": num_ranks,
        "_num_stages": num_stages,
        "_n_microbatches": num_microbatches,
        "_stages": [SimpleNamespace()],
        "_defer_pp_recv": False,
    }
    return runtime


@settings(max_examples=examples(60), deadline=None)
@given(layout=layouts())
def test_every_named_schedule_is_read_back_exactly(tmp_path_factory, layout):
    schedule, positions, count, chunks, replicas = layout
    plan, graph = plan_of(schedule, positions, count * replicas, num_chunks=chunks, num_replicas=replicas)
    found = write(plan, tmp_path_factory.mktemp("orders"))
    named, read = compute_orders(plan), compute_orders(found)
    assert [order.columns for order in read] == [order.columns for order in named]
    ours, theirs = build_program(found, graph), build_program(plan, graph)
    assert replace(ours, schedule=plan.schedule, plan_hash=theirs.plan_hash) == theirs
    check_program(ours)


@pytest.mark.parametrize("schedule", sorted(set(LAYOUTS) - {"dualpipe"}))
@pytest.mark.parametrize("replicas", [1, 2])
def test_torch_loads_what_is_written_and_writes_the_same_bytes(tmp_path, schedule, replicas):
    plan, _ = plan_of(schedule, 4, 8 * replicas, num_replicas=replicas)
    written = write_orders(plan, compute_orders(plan))
    assert (written.num_lines, written.num_pipelines, written.shared_stage) == (4, replicas, None)
    (tmp_path / "ours.csv").write_bytes(written.text.encode())
    runtime = torch_runtime(4, len(plan.stages), 8)
    runtime._load_csv(tmp_path / "ours.csv")
    positions = [stage.ranks[0] // replicas for stage in plan.stages]
    assert [runtime.stage_index_to_group_rank[stage] for stage in range(len(plan.stages))] == positions
    runtime._dump_csv(tmp_path / "theirs.csv", format="compute_only")
    assert (tmp_path / "theirs.csv").read_bytes() == written.text.encode()
    # With torch's messages in it, it is the same order.
    runtime._dump_csv(tmp_path / "messages.csv", format="compute_comms")
    assert b"SEND_B" in (tmp_path / "messages.csv").read_bytes()
    assert b"UNSHARD" in (tmp_path / "messages.csv").read_bytes()
    found = compute_orders(with_schedule(plan, str(tmp_path / "messages.csv")))
    assert [order.columns for order in found] == [order.columns for order in compute_orders(plan)]


@pytest.mark.parametrize(("schedule", "name"), [("interleaved", "interleaved"), ("zb-v", "zb-v"), ("gpipe", "gpipe")])
def test_what_torch_dumps_of_its_own_schedules_is_read(tmp_path, schedule, name):
    actions = torch_actions(schedule, 4, 8, 2)
    with (tmp_path / "torch.csv").open("w", newline="") as file:
        # Bubbles as torch writes them: an action that is None.
        csv.writer(file).writerows([[None, *own[:3], None, *own[3:], None] for own in actions])
    plan, _ = plan_of(name, 4, 8)
    found = compute_orders(with_schedule(plan, str(tmp_path / "torch.csv")))
    assert [order.columns for order in found] == [order.columns for order in compute_orders(plan)]


@settings(max_examples=examples(100))
@given(
    stage=st.integers(0, 9999),
    kind=st.sampled_from(["F", "I", "B", "W", "UNSHARD", "RESHARD", "REDUCE_GRAD"]),
    microbatch=st.one_of(st.none(), st.integers(0, 9999)),
)
def test_an_action_means_what_torch_reads(stage, kind, microbatch):
    text = f"{stage}{kind}{'' if microbatch is None else microbatch}"
    theirs = torch_schedules._Action.from_str(text)
    if (microbatch is None) == theirs.is_compute_op:
        with pytest.raises(ScheduleReferenceError, match="number after"):
            parse_lines(text.encode(), Path("orders.csv"))
        return
    (line,) = parse_lines(text.encode(), Path("orders.csv"))
    letters = {Opcode.FORWARD: "F", Opcode.BACKWARD: "B", Opcode.BACKWARD_INPUT: "I", Opcode.BACKWARD_WEIGHT: "W"}
    ours = [(s, letters[Opcode(o)], m) for o, s, m in line.columns.table().tolist()]
    assert ours == (
        [(theirs.stage_index, theirs.computation_type.value, theirs.microbatch_index)] * theirs.is_compute_op
    )


def test_replicas_that_are_not_alike_have_a_line_each(tmp_path):
    graph = chain_graph(3)
    plan = make_plan(graph, even_bounds(3, 3), [2, 1, 3], 12, schedule="1f1b")
    written = write_orders(plan, compute_orders(plan))
    assert (written.num_lines, written.num_pipelines, written.shared_stage) == (6, 1, 0)
    found = write(plan, tmp_path)
    assert [order.columns for order in compute_orders(found)] == [order.columns for order in compute_orders(plan)]
    with pytest.raises(AssertionError, match="Stage 0 is assigned to both rank"):
        torch_runtime(6, 3, 12)._load_csv(found.schedule)


def test_ranks_in_any_order_keep_their_lines(tmp_path):
    _, plan = pipeline(3, 6)
    ranks = (2, 0, 1)
    stages = tuple(replace(stage, ranks=(rank,)) for stage, rank in zip(plan.stages, ranks, strict=True))
    plan = replace(plan, stages=stages)
    found = write(plan, tmp_path)
    assert (tmp_path / "orders.csv").read_text().splitlines()[0].startswith("1F0,1F1,1B0")
    assert [order.columns for order in compute_orders(found)] == [order.columns for order in compute_orders(plan)]


FORWARDS = "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
WRONG = {
    "no action": (
        FORWARDS.replace("1F1", "1X1"),
        r"orders\.csv:2: action 2, '1X1', is not an action; expected one such as",
    ),
    "trailing": (FORWARDS.replace("1F1", "1F1x"), r"'1F1x', is not an action"),
    "other digits": (FORWARDS.replace("1F1", "1F\u0661"), r"is not an action"),
    "too large": (FORWARDS.replace("1F1", "1F99999999"), r"is not an action"),
    "no microbatch": (FORWARDS.replace("1F1", "1F"), r"has no number after F; expected that of a microbatch"),
    "a number too much": ("0UNSHARD1," + FORWARDS, r"has a number after UNSHARD; expected no number"),
    "twice": (
        FORWARDS.replace("1F1", "1F0"),
        r"orders\.csv:2: action 2, '1F0', comes twice; each microbatch runs once forward and once backward\. Correct",
    ),
    "backward first": (FORWARDS.replace("1F0,1F1,1B0", "1B0,1F0,1F1"), r"action 1, '1B0', comes before its forward"),
    "weights first": (FORWARDS.replace("1B0", "1W0,1I0"), r"'1W0', comes before its BackwardInput"),
    "another stage": (
        FORWARDS.replace("1F0,1F1", "0F0,0F1").replace("1B", "0B"),
        r"'0F0', is not for rank 1; expected stage 1 and a microbatch of 0, 1",
    ),
    "another microbatch": (
        FORWARDS.replace("1B1", "1B2"),
        r"'1B2', is not for rank 1; expected stage 1 and a microbatch of 0, 1",
    ),
    "missing": (
        FORWARDS.replace(",0B1", ""),
        r"orders\.csv:1: the line of rank 0 ends without Backward\(stage=0, microbatch=1\) \(1 of 4",
    ),
    "no weights": (FORWARDS.replace("0B1", "0I1"), r"ends without Backward\(stage=0, microbatch=1\)"),
    "too many ranks": (FORWARDS + "2F0,2F1,2B0,2B1\n", r"orders\.csv has 3 lines; the plan has 2 ranks"),
    "too few": (FORWARDS.splitlines()[0], r"orders\.csv has 1 lines; the plan has 2 ranks"),
    "a gap": (FORWARDS.replace("1F", "2F").replace("1B", "2B"), r"the stages 0, 2; expected all from 0 on"),
    "nothing": ("", r"the stages none; expected all from 0 on"),
    "an empty line": (FORWARDS.replace("\n", "\n\n", 1), r"has 3 lines; the plan has 2 ranks"),
    "joins two forwards": ("(0F0;0F1)OVERLAP_F_B,0B0,0B1\n", r"joins other actions than one forward and one backward"),
    "no text": (b"0F0\n\xff", r"orders\.csv:2: not text in UTF-8"),
    "quotes": ('0F0,"0F1\n', r"orders\.csv:1: unexpected end of data"),
    "no partner": (
        FORWARDS.replace("0F0,", "0F0,0SEND_F0,"),
        r"orders\.csv:1: action 2, '0SEND_F0', has no partner; expected 1RECV_F0 on another line",
    ),
    "sent too early": (
        "0SEND_F0,0F0,0F1,0B0,0B1\n1RECV_F0,1F0,1F1,1B0,1B1\n",
        r"orders\.csv:1: action 1, '0SEND_F0', comes before the computation whose value it sends",
    ),
    "received too late": (
        "0F0,0SEND_F0,0F1,0B0,0B1\n1F0,1RECV_F0,1F1,1B0,1B1\n",
        r"orders\.csv:2: action 2, '1RECV_F0', comes after what needs its value",
    ),
    "sent twice": (
        "0F0,0SEND_F0,0SEND_F0,0F1,0B0,0B1\n1RECV_F0,1F0,1F1,1B0,1B1\n",
        r"'0SEND_F0', is also in line 1; expected it once",
    ),
    "sent from elsewhere": (
        "0F0,0F1,1RECV_F0,0B0,0B1\n1F0,0SEND_F0,1F1,1B0,1B1\n",
        r"belongs to a stage or microbatch that its line does not compute",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_refused_with_its_line(tmp_path, case):
    text, message = WRONG[case]
    (tmp_path / "orders.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    _, plan = pipeline(2, 2)
    with pytest.raises((ScheduleError, ScheduleReferenceError), match=message):
        compute_orders(with_schedule(plan, str(tmp_path / "orders.csv")))


def test_the_file_of_these_cases_is_right_without_their_fault(tmp_path):
    (tmp_path / "orders.csv").write_text(FORWARDS)
    graph, plan = pipeline(2, 2)
    check_program(build_program(with_schedule(plan, str(tmp_path / "orders.csv")), graph))


def test_a_circle_is_named_with_lines_and_actions(tmp_path):
    (tmp_path / "orders.csv").write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    graph, plan = pipeline(2, 2)
    plan = with_schedule(plan, str(tmp_path / "orders.csv"))
    for call in (lambda: build_program(plan, graph), lambda: picture_schedule(plan)):
        with pytest.raises(
            DeadlockError,
            match=r"rank 0 waits before B0\.0 \(.*orders\.csv:1, action 2\), which needs B1\.0 of rank 1; "
            r"rank 1 waits before F1\.1 \(.*orders\.csv:2, action 1\), which needs F0\.1 of rank 0",
        ):
            call()


def test_a_changed_file_is_refused(tmp_path):
    graph, plan = pipeline(2, 2)
    path = tmp_path / "orders.csv"
    path.write_text(FORWARDS)
    plan = with_schedule(plan, str(path))
    assert decode_document(Plan, encode_document(plan), "plan") == plan
    build_program(plan, graph)
    path.write_text(FORWARDS.replace("0B0,0B1", "0B1,0B0"))
    with pytest.raises(
        ScheduleReferenceError, match=f"changed since the plan was made: its hash was {plan.schedule_hash}"
    ):
        build_program(plan, graph)
    path.unlink()
    (tmp_path / "order.csv").touch()
    with pytest.raises(
        ScheduleReferenceError, match=r"There is no file .*orders\.csv' \(did you mean 'order\.csv'\?\)"
    ):
        build_program(plan, graph)
    with pytest.raises(PlanError, match="16 hexadecimal digits"):
        replace(plan, schedule_hash="")


def test_files_that_are_too_large_are_not_read(tmp_path):
    path = tmp_path / "orders.csv"
    with path.open("wb") as file:
        file.truncate(2**25)
    with pytest.raises(ScheduleReferenceError, match="more than 16777216 bytes, too large for an order"):
        name_schedule(str(path))


def test_stages_of_a_file_stand_on_their_lines(tmp_path):
    plan, _ = plan_of("dualpipe", 4, 8)
    file = write(plan, tmp_path)
    assert find_schedule(file).lines_of_stages() == tuple(stage.ranks for stage in plan.stages)
