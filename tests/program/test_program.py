"""Programs of random plans keep every rule; their contents are checked against direct counts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.program import (
    ProgramBuilder,
    build_program,
    gradient_buckets,
    local_microbatches,
    max_in_flight,
)
from meshwright.runtime import arrange_rank
from meshwright.spec import (
    AllReduce,
    Backward,
    DeadlockError,
    Forward,
    GradientExchange,
    GraphMismatchError,
    Opcode,
    OptimizerStep,
    PlanError,
    Program,
    ProgramError,
    Receive,
    Send,
    decode_document,
    encode_document,
    slice_graph,
)
from tests.graphs import chain_graph, even_bounds, make_plan
from tests.marks import examples
from tests.program.check import check_program


@st.composite
def plans(draw):
    num_stages = draw(st.integers(1, 5))
    num_layers = draw(st.integers(num_stages, 8))
    pairs = [(i, j) for i in range(num_layers) for j in range(i + 2, num_layers)]
    graph = chain_graph(
        num_layers,
        tied=num_layers > 1 and draw(st.booleans()),
        skips=tuple(draw(st.lists(st.sampled_from(pairs), max_size=2, unique=True))) if pairs else (),
        frozen=draw(st.integers(0, num_layers - 1)),
        random=tuple(draw(st.lists(st.integers(0, num_layers - 1), max_size=3, unique=True))),
    )
    replicas = draw(st.lists(st.integers(1, 4), min_size=num_stages, max_size=num_stages))
    exchange = GradientExchange(bucket_bytes=draw(st.integers(1, 300)), overlap=draw(st.booleans()))
    return graph, make_plan(
        graph,
        even_bounds(num_layers, num_stages),
        replicas,
        draw(st.integers(max(replicas), 12)),
        schedule=draw(st.sampled_from(["gpipe", "1f1b"])),
        exchange=exchange,
    )


def rank_of_instruction(program):
    ranks = np.array([stream.rank for stream in program.streams])
    return np.repeat(ranks, np.diff(program.body.stream_offsets))


@given(plans())
@settings(max_examples=examples(150), deadline=None)
def test_every_program_keeps_the_rules(case):
    graph, plan = case
    program = build_program(plan, graph)
    check_program(program)


@given(plans())
@settings(max_examples=examples(60), deadline=None)
def test_each_microbatch_runs_once_per_stage_on_its_replica(case):
    graph, plan = case
    program = build_program(plan, graph)
    body, ranks = program.body, rank_of_instruction(program)
    slices = slice_graph(graph, plan.bounds)
    for opcode, wanted in ((Opcode.FORWARD, lambda s: True), (Opcode.BACKWARD, lambda s: s.has_backward)):
        found = sorted(
            (int(body.stage[i]), int(body.microbatch[i]), int(ranks[i])) for i in np.flatnonzero(body.opcode == opcode)
        )
        assert found == sorted(
            (s, m, plan.stages[s].ranks[m % len(plan.stages[s].ranks)])
            for s in range(len(plan.stages))
            if wanted(slices[s])
            for m in range(plan.num_microbatches)
        )


@given(plans())
@settings(max_examples=examples(60), deadline=None)
def test_microbatches_in_flight_never_exceed_the_bound(case):
    graph, plan = case
    program = build_program(plan, graph)
    slices = slice_graph(graph, plan.bounds)
    for stream in range(len(program.streams)):
        held = 0
        for index in program.body.stream_range(stream):
            instruction = program.body.instruction(index)
            if isinstance(instruction, Forward) and slices[instruction.stage].has_backward:
                held += 1
                assert held <= max_in_flight(plan, instruction.stage)
            elif isinstance(instruction, Backward):
                held -= 1


def test_1f1b_order_is_the_papers():
    graph = chain_graph(4)
    program = build_program(make_plan(graph, even_bounds(4, 4), [1, 1, 1, 1], 5), graph)
    orders = {}
    for stream, item in enumerate(program.streams):
        if item.name == "compute":
            instructions = (program.body.instruction(i) for i in program.body.stream_range(stream))
            orders[item.rank] = " ".join(
                f"{type(i).__name__[0]}{i.microbatch}" for i in instructions if isinstance(i, Forward | Backward)
            )
    assert orders == {
        0: "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4",
        1: "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
        2: "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
        3: "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    }


def test_transfers_carry_what_crosses_and_only_that():
    graph = chain_graph(3, skips=((0, 2),), width=8)
    program = build_program(make_plan(graph, [(0, 1), (1, 2), (2, 3)], [1, 1, 1], 2, microbatch_size=3), graph)
    sends = sorted(
        (i.stage, i.peer, i.payload, i.microbatch, i.num_bytes)
        for i in map(program.body.instruction, range(program.body.num_instructions))
        if isinstance(i, Send)
    )
    activation_bytes = 3 * 8 * 4
    assert sends == sorted(
        (s, t, payload, m, activation_bytes)
        for m in range(2)
        for s, t, payload in (
            (0, 1, "activation"),
            (0, 2, "activation"),
            (1, 2, "activation"),
            (1, 0, "gradient"),
            (2, 0, "gradient"),
            (2, 1, "gradient"),
        )
    )


@given(plans())
@settings(max_examples=examples(60), deadline=None)
def test_buckets_cover_shared_trainable_parameters_exactly_once(case):
    graph, plan = case
    holders = {}
    for stage in slice_graph(graph, plan.bounds):
        for parameter in stage.parameters:
            holders.setdefault(parameter, set()).update(plan.stages[stage.index].ranks)
    shared = {p for p, ranks in holders.items() if len(ranks) > 1 and graph.tensors[p].requires_grad}
    buckets = gradient_buckets(graph, plan)
    listed = [p for bucket in buckets for p in bucket.parameters]
    assert sorted(listed) == sorted(shared)
    for bucket in buckets:
        assert all(holders[p] == set(bucket.ranks) for p in bucket.parameters)
        size = sum(graph.tensors[p].num_bytes(1) for p in bucket.parameters)
        assert bucket.num_bytes == size
        assert size <= plan.exchange.bucket_bytes or len(bucket.parameters) == 1


def test_buckets_fill_in_the_order_of_readiness():
    graph = chain_graph(4)
    plan = make_plan(graph, [(0, 4)], [2], 2, exchange=GradientExchange(bucket_bytes=130))
    names = [[graph.tensors[p].name for p in bucket.parameters] for bucket in gradient_buckets(graph, plan)]
    assert names == [["layer3.weight", "layer2.weight"], ["layer1.weight", "layer0.weight"]]


def test_a_tied_weight_is_summed_over_both_stages_and_comes_last():
    graph = chain_graph(3, tied=True)
    plan = make_plan(graph, [(0, 1), (1, 3)], [2, 1], 2)
    buckets = gradient_buckets(graph, plan)
    assert [(b.stages, b.ranks) for b in buckets] == [((0, 1), (0, 1, 2))]
    program = build_program(plan, graph)
    members = [
        int(rank)
        for rank, opcode in zip(rank_of_instruction(program), program.body.opcode, strict=True)
        if opcode == Opcode.ALL_REDUCE
    ]
    assert sorted(members) == [0, 1, 2]


@pytest.mark.parametrize("overlap", [True, False])
def test_all_reduces_wait_for_marks_or_for_the_whole_backward(overlap):
    graph = chain_graph(4)
    exchange = GradientExchange(bucket_bytes=64, overlap=overlap)
    program = build_program(make_plan(graph, [(0, 4)], [2], 2, exchange=exchange), graph)
    body = program.body
    waits = [body.waits_of(i).tolist() for i in np.flatnonzero(body.opcode == Opcode.ALL_REDUCE)]
    assert len(waits) == 8
    assert all((w[0] >= body.num_instructions) == overlap for w in waits)
    assert len(body.mark_index) == (8 if overlap else 0)


def test_frozen_front_has_no_backward_no_gradient_transfer_no_optimizer():
    graph = chain_graph(4, frozen=2)
    program = build_program(make_plan(graph, [(0, 2), (2, 4)], [1, 1], 3), graph)
    instructions = [program.body.instruction(i) for i in range(program.body.num_instructions)]
    assert not [i for i in instructions if isinstance(i, Backward) and i.stage == 0]
    assert not [i for i in instructions if isinstance(i, Send | Receive) and i.payload == "gradient"]
    assert [i.stage for i in instructions if isinstance(i, OptimizerStep)] == [1]


@given(plans())
@settings(max_examples=examples(30), deadline=None)
def test_round_trip(case):
    graph, plan = case
    program = build_program(plan, graph)
    again = decode_document(Program, encode_document(program), "program")
    assert again.body == program.body
    assert again == program


def test_wrong_plans_are_refused():
    graph = chain_graph(4)
    other = chain_graph(4, width=8)
    with pytest.raises(GraphMismatchError, match="make the plan again"):
        build_program(make_plan(other, even_bounds(4, 2), [1, 1], 2), graph)
    with pytest.raises(PlanError, match="at most 4 stages"):
        build_program(make_plan(graph, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)], [1] * 5, 5), graph)
    with pytest.raises(PlanError, match="some would have nothing to do"):
        make_plan(graph, even_bounds(4, 2), [3, 1], 2)


def test_check_names_what_is_wrong():
    def program(*rows):
        builder = ProgramBuilder(2)
        handles = []
        for rank, stream, instruction, group, waits in rows:
            handles.append(builder.append(rank, stream, instruction, group=group, waits=[handles[w] for w in waits]))
        return builder.build(schedule="test", plan_hash="")

    twice = program(
        (0, "compute", Forward(stage=0, microbatch=0), (), ()), (1, "compute", Forward(stage=0, microbatch=0), (), ())
    )
    with pytest.raises(ProgramError, match=r"F0\.0 on rank 1: it already ran forward on rank 0"):
        check_program(twice)
    with pytest.raises(ProgramError, match=r"B0\.0 on rank 0: its forward does not come before"):
        check_program(program((0, "compute", Backward(stage=0, microbatch=0), (), ())))
    lonely = Send(stage=0, microbatch=0, peer=1, payload="activation", num_bytes=4)
    with pytest.raises(ProgramError, match="Rank 0 sends and rank 1 receives different sequences"):
        check_program(program((0, "send", lonely, (0, 1), ())))
    with pytest.raises(ProgramError, match="every member must meet it equally often"):
        check_program(program((0, "exchange", AllReduce(stage=0, bucket=0, num_bytes=4), (0, 1), ())))


def test_a_circle_is_a_deadlock_and_named():
    builder = ProgramBuilder(2)
    first = builder.append(0, "compute", Forward(stage=0, microbatch=0))
    second = builder.append(1, "compute", Forward(stage=1, microbatch=0), waits=[first])
    builder.wait(first, second)
    with pytest.raises(DeadlockError, match=r"F0\.0 on rank 0 waits for F1\.0 on rank 1"):
        check_program(builder.build(schedule="test", plan_hash=""))


def joined(need, *, circle):
    """Rank 0 waits for ranks 1 and 2, the second of which may wait for rank 0."""
    builder = ProgramBuilder(3)
    others = [builder.append(rank, "compute", Forward(stage=rank, microbatch=0)) for rank in (1, 2)]
    join = builder.append(0, "compute", Forward(stage=0, microbatch=0), waits=others, need=need)
    if circle:
        builder.wait(others[1], join)
    return builder.build(schedule="test", plan_hash="")


def test_a_join_needs_some_of_its_waits():
    body = joined(1, circle=True).body
    assert (body.join_instruction.tolist(), body.join_need.tolist()) == ([0], [1])
    check_program(joined(1, circle=True))
    check_program(joined(2, circle=False))
    with pytest.raises(DeadlockError, match=r"F0\.0 on rank 0 waits for 2 of 2, of which these .* F2\.0 on rank 2; F2"):
        check_program(joined(2, circle=True))


def test_joins_of_streams_in_any_order_keep_their_needs():
    builder = ProgramBuilder(2)
    done = [builder.append(1, "send", Forward(stage=1, microbatch=k)) for k in range(3)]
    for rank, need in ((1, 3), (0, 2), (0, 1)):
        builder.append(rank, "compute", Forward(stage=rank, microbatch=need), waits=done, need=need)
    body = builder.build(schedule="test", plan_hash="").body
    assert body.microbatch[body.join_instruction].tolist() == body.join_need.tolist() == [2, 1, 3]


def test_joins_that_cannot_be():
    builder = ProgramBuilder(2)
    receive = Receive(stage=0, microbatch=0, peer=1, payload="activation", num_bytes=4)
    first = builder.append(1, "compute", Forward(stage=1, microbatch=0))
    for instruction, need in ((Forward(stage=0, microbatch=0), 0), (receive, 1)):
        with pytest.raises(ProgramError, match=f"needs {need} of its waits; expected 1 or more, and not for a receive"):
            builder.append(0, "compute", instruction, waits=[first], need=need)
    builder.append(0, "compute", Forward(stage=0, microbatch=0), waits=[first], need=2)
    with pytest.raises(ProgramError, match=r"Instruction 1 needs 2 of its waits, but has 1"):
        builder.build(schedule="test", plan_hash="")


def test_joins_are_not_run():
    program = joined(1, circle=False)
    with pytest.raises(
        ProgramError, match=r"continues when 1 of its waits have happened\. Joins can only be simulated"
    ):
        arrange_rank(program, program.body, 1)


def test_local_microbatches_are_dealt_round_robin():
    graph = chain_graph(2)
    plan = make_plan(graph, [(0, 2)], [3], 7)
    assert [list(local_microbatches(plan, 0, replica)) for replica in range(3)] == [[0, 3, 6], [1, 4], [2, 5]]
