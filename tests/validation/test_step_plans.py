"""Rows of measured steps as plans: what `validate` scores is what the `plan` command says of the same layout."""

import random
from dataclasses import replace
from itertools import compress

import pytest

from meshwright.cli.main import load_verb
from meshwright.cli.model_arguments import graphs_of
from meshwright.cli.plan.plan_command import make_problem
from meshwright.cli.plan.plan_request import PlanRequest
from meshwright.cli.planning import given_options
from meshwright.planner import Proposal, search_plans
from meshwright.spec import Optimizer, to_picoseconds, write_document
from meshwright.templates.shapes import ResidualShape
from meshwright.validation.datasets import load_all_steps
from meshwright.validation.step_plans import (
    StepPrediction,
    evaluate_step,
    evaluate_steps,
    name_obstacle,
    plan_step,
    predictions_of,
)
from meshwright.validation.step_rows import read_step
from meshwright.validation.step_sets import scored_rows
from meshwright.validation.step_table import read_steps

SEED = 20261127


@pytest.fixture(scope="module")
def cases():
    return {case.row_id: case for case in read_steps(scored_rows(load_all_steps()))[0]}


@pytest.fixture(scope="module")
def drawn(cases):
    """Three rows of each source, and more of some kinds of layouts, of those that a plan can express."""
    expressed = [case for case in cases.values() if not name_obstacle(case)]
    draw, found = random.Random(SEED), []
    kinds = (
        (2, lambda case: case.setup.zero == 3),
        (2, lambda case: case.setup.tp > 1 and case.setup.pp > 1),
        (1, lambda case: case.setup.ep > 1),
        (1, lambda case: isinstance(case.shape, ResidualShape)),
    )
    for origin in sorted({case.origin for case in expressed}):
        found += draw.sample([case for case in expressed if case.origin == origin], 3)
    for count, kind in kinds:
        found += draw.sample([case for case in expressed if kind(case) and case not in found], count)
    return found


class StoppedError(Exception):
    """Ends a search with what it says of the one layout that was to be looked at."""

    def __init__(self, item):
        super().__init__()
        self.item = item


def plan_command(planned, folder):
    """What the search of `meshwright plan` says of this layout, asked for with files and options."""
    graph, cluster = folder / "graph.json", folder / "cluster.json"
    write_document(planned.graph, graph)
    write_document(planned.cluster, cluster)
    plan = planned.plan
    words = [
        *(str(graph), f"--cluster={cluster}", f"--ranks={plan.num_devices}"),
        *(f"--batch={plan.workload.global_batch}", f"--microbatch-size={plan.microbatch_size}"),
        *(f"--precision={plan.workload.precision}", f"--optimizer={plan.workload.optimizer.option}"),
        *(f"--schedule={plan.schedule}", f"--zero={plan.exchange.zero}", f"--software={planned.software.name}"),
    ]
    context = load_verb("plan").make_context("plan", words)
    request = PlanRequest(given=given_options(context), **context.params)
    request.check()

    def layout(_problem, _state):
        raise StoppedError((yield Proposal(plan, counts=False)))

    with pytest.raises(StoppedError) as said:
        search_plans(make_problem(request, graphs_of(request.model, request.sizes)), layout)
    return said.value.item


def test_thirty_rows_are_drawn(drawn):
    assert len({case.row_id for case in drawn}) == len(drawn) == 30


@pytest.mark.long
@pytest.mark.parametrize("place", range(30))
def test_what_is_scored_is_what_the_plan_command_says(drawn, place, tmp_path):
    planned = plan_step(drawn[place])
    ours, theirs = evaluate_step(planned), plan_command(planned, tmp_path)
    assert to_picoseconds(ours.step_time_s) == to_picoseconds(theirs.step_time_s)
    assert ours.peak_memory_bytes == theirs.peak_memory_bytes
    # A search does not ask what the allocator adds on a rank whose peak is more than a tenth above its limit.
    limits = zip(theirs.peak_memory_bytes, theirs.memory_limit_bytes, strict=True)
    kept = [peak <= 1.1 * limit for peak, limit in limits]
    assert list(compress(ours.reserved_bytes, kept)) == list(compress(theirs.reserved_bytes, kept))


def test_a_row_is_laid_out_as_it_states(cases):
    plan = plan_step(cases["korth-t5-175B-full"]).plan
    assert (plan.num_devices, plan.sharding.tensor, plan.schedule) == (64, 8, "interleaved")
    # Three parts of four layers on each of eight stages; embedding and head with the first and the last one.
    assert [stage.ranks for stage in plan.stages] == [(stage,) for _ in range(3) for stage in range(8)]
    assert plan.bounds[0] == (0, 5)
    assert plan.bounds[-1] == (93, 98)
    assert len(plan.recompute) == 96
    assert (plan.workload.global_batch, plan.microbatch_size) == (64, 1)
    assert plan.workload.precision == "mixed-float16"


def test_replicas_stand_side_by_side_and_take_microbatches_in_turn(cases):
    case = cases["vtrain-single-133"]
    plan = plan_step(case).plan
    assert (case.setup.tp, case.setup.pp, case.setup.dp, case.setup.num_microbatches) == (2, 2, 2, 4)
    assert [stage.ranks for stage in plan.stages] == [(0, 1), (2, 3)]
    assert plan.num_microbatches == 8
    assert plan.workload.global_batch == 32


def test_embedding_and_head_may_be_parts_of_their_own(cases):
    planned = plan_step(cases["zb-t4-1.5B-1F1B-I-24"])
    assert planned.plan.bounds[0] == (0, 1)
    assert planned.plan.bounds[-1] == (23, 24)


def test_selective_recompute_is_of_attention_that_keeps_its_scores(cases):
    case = cases["korth-t5-22B-selective"]
    planned = plan_step(case)
    assert len(planned.plan.recompute) == 48
    start, stop = planned.plan.recompute[0]
    kinds = [planned.graph.ops[i].kind.split(".")[1] for i in range(start, stop)]
    assert kinds == ["matmul", "softmax", "dropout", "matmul"]
    fused = replace(case, software=replace(case.software, fused_attention=True))
    assert plan_step(fused).plan.recompute == ()


def test_op_recompute_keeps_attention_and_every_second_product(cases):
    planned = plan_step(cases["tt-1-8-bf16-0"])
    block = planned.graph.layers[1]
    assert (block.start, block.stop) in planned.plan.recompute
    kept = [planned.graph.ops[i] for i in planned.plan.keeps if block.start <= i < block.stop]
    assert [op.module.rpartition(".")[2] for op in kept] == ["query", "value", "attention", "gate", "down"]


def test_a_stated_optimizer_is_the_plans(cases):
    wide = plan_step(next(case for case in cases.values() if isinstance(case.shape, ResidualShape)))
    assert wide.plan.workload.optimizer == Optimizer(kind="sgd", momentum=True)
    assert wide.plan.workload.precision == "float32"


def test_what_no_plan_can_say_is_named(cases):
    asked = [cases["zb-t4-1.5B-1F1B-24"], cases["alpa-node-moe-2-auto_sharding-50"]]
    found = evaluate_steps(asked)
    assert isinstance(found[0], StepPrediction)
    assert found[0].low_s < found[0].seconds < found[0].high_s
    assert str(found[1]) == "the optimizer Adafactor"
    assert predictions_of(found).seconds.tolist() == [found[0].seconds]


@pytest.mark.parametrize(
    "start", ["tt-4-2D", "zb-t4-6.2B-1F1B-I-24", "sc21-t1-76.1B", "alpa-node-gpt-4-zero_2", "mpt-1"]
)
def test_no_words_about_a_row_change_its_prediction(cases, start):
    row = next(row for row in scored_rows(load_all_steps()) if row["id"].startswith(start))
    blank = plan_step(read_step({**row, "id": "x", "source": "", "locator": "", "notes": ""}))
    assert blank == plan_step(cases[row["id"]])
