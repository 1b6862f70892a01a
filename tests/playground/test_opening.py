"""Every plan that `plan` writes opens: the page shows that plan, and its figures are those of the planner."""

import json
from dataclasses import replace

import pytest

from meshwright.cost import CostModel
from meshwright.planner import evaluate_plan, list_shardings
from meshwright.playground import Controls, OfferedModel, Workbench, from_query, state_of_plan, to_query
from meshwright.playground.controls import AS_PLANNED
from meshwright.playground.page_layout import make_plan as plan_of_state
from meshwright.playground.service import answer_data
from meshwright.program import with_schedule
from meshwright.spec import (
    GradientExchange,
    Loader,
    Nvme,
    Offload,
    Optimizer,
    PlanError,
    PlaygroundError,
    ScheduleReferenceError,
    Sharding,
    StagePlan,
    Workload,
    load_cluster,
    load_shipped_graph,
    read_offload,
    recompute_choices,
    with_branches,
    write_document,
)
from meshwright.spec.made_with import MadeWith
from meshwright.spec.schedules import ASYNCHRONOUS_SCHEDULES
from tests.graphs import chain_graph, even_bounds, make_plan
from tests.planner.searching import search_plans
from tests.program.layouts import LAYOUTS, plan_of

GPT = load_shipped_graph("gpt-tiny")
CLUSTER = "2x4xA100"


def opened(plan, graph, cluster=CLUSTER):
    """The page's answer to a plan, found equal to what the planner says of it."""
    plan = replace(plan, cluster=cluster)
    machine = load_cluster(cluster)
    bench = Workbench({plan.model: OfferedModel(open=lambda: lambda _: graph, sizes=plan.model_sizes)})
    on = Controls(num_nodes=len(machine.nodes), devices_per_node=machine.nodes[0].num_devices, kind="A100")
    state = bench.open_plan(plan, on, graph)
    # A link to it says the same.
    assert from_query(to_query(state)) == state
    answer = bench.answer(state)
    assert answer.plan == plan
    cost = CostModel(cluster=machine, precision=plan.workload.precision)
    assert answer.ranked == evaluate_plan(plan, graph, machine, cost)
    data = json.loads(json.dumps(answer_data(answer), allow_nan=False))
    assert data["document"]["results"]
    return answer, data


def found(**options):
    """What searches write for gpt-tiny."""
    workload = options.pop("workload", Workload(global_batch=64, precision="mixed"))
    return search_plans(lambda _: GPT, load_cluster(CLUSTER), workload, model="gpt-tiny", **options).ranked


@pytest.mark.parametrize(
    "options",
    [
        {"zero": (0, 1, 2, 3)},
        {"shardings": list_shardings(tensor=(2, 4))},
        {"shardings": list_shardings(tensor=(2,), context=(1, 2), sequence_parallel=True), "zero": (1,)},
        {"recompute": ("none", "full")},
        {"recompute": ("0:2",), "schedules": ("gpipe",)},
        {"schedules": ("interleaved", "looped-bfs", "zb-h1"), "num_stages": (2,)},
        {"schedules": ("interleaved",), "num_stages": (2,), "num_chunks": (3,)},
        {"schedules": ("zb-v", "zb-h2", "dualpipe-v", "dualpipe"), "num_stages": (2,)},
        {"schedules": ("pipedream", "pipedream-2bw"), "workload": Workload(global_batch=64)},
        {"num_devices": (3, 5, 6)},
        {"exchange": GradientExchange(bucket_bytes=1000, overlap=False)},
        {"workload": Workload(global_batch=48, precision="amp", optimizer=Optimizer.named("sgd-momentum"))},
    ],
    ids=str,
)
def test_plans_that_a_search_finds_open(options):
    items = found(max_plans=4, **options)
    assert items
    for item in items:
        opened(item.plan, GPT)


def test_a_plan_for_inference_opens():
    graph = replace(chain_graph(12, width=64), mode="inference", has_loss=False)
    machine = load_cluster(CLUSTER)
    workload = Workload(kind="inference", global_batch=32, precision="bfloat16")
    for item in search_plans(lambda _: graph, machine, workload, model="chain", max_plans=4).ranked:
        assert opened(item.plan, graph)[0].plan.workload.kind == "inference"


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("schedule", [*LAYOUTS, *ASYNCHRONOUS_SCHEDULES])
def test_every_named_schedule_opens(schedule, num_replicas):
    if schedule in ASYNCHRONOUS_SCHEDULES:
        graph = chain_graph(4)
        plan = make_plan(graph, even_bounds(4, 4), [num_replicas] * 4, 8 * num_replicas, schedule=schedule)
    elif LAYOUTS[schedule] == "bidirectional" and num_replicas > 1:
        pytest.skip("runs both ways with one replica only")
    else:
        plan, graph = plan_of(schedule, 4, 8 * num_replicas, num_replicas=num_replicas)
    answer, _ = opened(plan, graph)
    # The controls say all of it.
    assert not answer.state.needs_plan


TWO = make_plan(GPT, even_bounds(len(GPT.layers), 2), [2, 2], 16)
OWN = replace(TWO, model="gpt-tiny")


@pytest.mark.parametrize(
    "plan",
    [
        replace(
            OWN,
            stages=tuple(
                replace(stage, ranks=ranks) for stage, ranks in zip(OWN.stages, [(0, 3), (2, 1)], strict=True)
            ),
        ),
        replace(OWN, stages=(replace(OWN.stages[0], shares=(10, 6)), OWN.stages[1])),
        make_plan(GPT, even_bounds(len(GPT.layers), 3), [1, 2, 4], 16),
        replace(OWN, exchange=GradientExchange(clip_norm=True, loss_scale=True, zero=1)),
        replace(OWN, exchange=GradientExchange(algorithm="hierarchical", node_size=2)),
        replace(OWN, exchange=GradientExchange(servers=(4, 5), credit_bytes=4_000_000, partition_bytes=1_000_000)),
        replace(OWN, exchange=GradientExchange(every_steps=4)),
        replace(OWN, exchange=GradientExchange(across_steps=True)),
        replace(OWN, workload=replace(OWN.workload, loader=Loader(seconds_per_sample=1e-3))),
        replace(OWN, sharding=Sharding(tensor=2, sequence_parallel=True, regather=True)),
        replace(OWN, sharding=Sharding(context=2, context_method="all_gather")),
        replace(OWN, recompute=((3, 9), (11, 12))),
        replace(OWN, recompute=recompute_choices(GPT)["full"].ranges),
        replace(OWN, model_sizes=(("sequence_length", 64),), made_with=MadeWith(software="meshwright 0.0")),
    ],
    ids=lambda plan: plan.describe_extras() or plan.describe(),
)
def test_plans_with_parts_that_no_control_says_open(plan):
    opened(plan, GPT)


@pytest.mark.parametrize("words", ["optimizer=host", "optimizer=host,parameters=host", "optimizer=nvme"])
def test_plans_that_keep_states_away_open(words, tmp_path):
    offload = read_offload((words,))
    machine = load_cluster(CLUSTER)
    node = replace(machine.nodes[0], host_memory_bandwidth_bytes_per_s=400e9)
    if "nvme" in words:
        node = replace(node, nvme=nvme())
    machine = replace(machine, nodes=(node, replace(node, name="other")))
    file = str(write_document(machine, tmp_path / "mine.toml"))
    machine = replace(load_cluster(file), name=file)
    zero = 3 if offload.parameters == "host" else 0
    plan = replace(OWN, cluster=file, offload=offload, exchange=GradientExchange(zero=zero))
    bench = Workbench({"gpt-tiny": OfferedModel(open=lambda: lambda _: GPT)}, {file: machine})
    answer = bench.answer(bench.open_plan(plan, Controls(kind=file, num_nodes=2, devices_per_node=4)))
    assert answer.plan == plan
    fresh = evaluate_plan(plan, GPT, machine, CostModel(cluster=machine, precision=plan.workload.precision))
    assert answer.ranked == fresh


def nvme():
    return Nvme(capacity_bytes=15_000_000_000_000, read_bytes_per_s=25e9, write_bytes_per_s=15e9)


def test_a_plan_with_waves_opens_with_its_staleness():
    graph = chain_graph(4)
    plan = make_plan(graph, even_bounds(4, 4), [2] * 4, 16, schedule="hetpipe")
    _, data = opened(replace(plan, exchange=GradientExchange(staleness=2)), graph)
    assert "staleness = 2" in data["carried"]
    assert "is asynchronous" in data["document"]["results"][0]["explanation"]


def test_a_plan_with_branches_opens_and_its_cuts_can_be_moved():
    graph = chain_graph(6, reads={3: 0, 5: 2}, skips=((4, 5),))
    plan = with_branches(make_plan(graph, even_bounds(6, 6), [1] * 6, 8), graph)
    assert plan.has_branches
    answer, _ = opened(plan, graph)
    assert answer.state.layout == AS_PLANNED


def test_own_schedules_open_by_their_files_and_a_changed_file_is_told(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from meshwright.program import Backward, Forward\n\n\n"
        "def order(plan, rank):\n"
        "    (stage,) = plan.stages_of(rank)\n"
        "    replica = plan.stages[stage].ranks.index(rank)\n"
        "    own = range(replica, plan.num_microbatches, len(plan.stages[stage].ranks))\n"
        "    yield from (Forward(stage=stage, microbatch=m) for m in own)\n"
        "    yield from (Backward(stage=stage, microbatch=m) for m in own)\n"
    )
    plan = with_schedule(OWN, f"{file}:order")
    answer, data = opened(plan, GPT)
    assert answer.state.schedule == AS_PLANNED
    assert str(file) in data["carried"]
    # No link says the file's name.
    assert "mine" not in to_query(answer.state)
    file.write_text(file.read_text() + "\n")
    with pytest.raises(ScheduleReferenceError, match="changed since"):
        opened(plan, GPT)


def test_a_file_of_orders_opens(tmp_path):
    orders = tmp_path / "orders.csv"
    orders.write_text("0F0,0F1,0B0,0B1\n,1F0,1F1,1B0,1B1\n")
    base = replace(make_plan(GPT, even_bounds(len(GPT.layers), 2), [1, 1], 2), model="gpt-tiny")
    answer, data = opened(with_schedule(base, str(orders)), GPT)
    assert answer.state.schedule == AS_PLANNED
    assert "orders.csv" in data["carried"]


def test_what_is_as_planned_can_be_changed_and_stays_otherwise():
    machine = load_cluster(CLUSTER)
    plan = replace(
        OWN,
        cluster=CLUSTER,
        stages=(replace(OWN.stages[0], ranks=(0, 3)), replace(OWN.stages[1], ranks=(2, 1))),
        exchange=GradientExchange(clip_norm=True),
    )
    bench = Workbench({"gpt-tiny": OfferedModel(open=lambda: lambda _: GPT)})
    state = bench.open_plan(plan, Controls(num_nodes=2, devices_per_node=4))
    cut = state.cuts[0] - 1
    moved = bench.answer(replace(state, cuts=(cut,))).plan
    assert [stage.ranks for stage in moved.stages] == [(0, 3), (2, 1)]
    assert (moved.stages[0].stop, moved.exchange.clip_norm) == (cut, True)
    assert bench.answer(replace(state, zero=1)).plan.exchange == GradientExchange(clip_norm=True, zero=1)
    plain = bench.answer(replace(state, rest="none", layout="stage-major"))
    assert plain.plan.exchange == GradientExchange()
    assert answer_data(plain)["carried"] == ""
    with pytest.raises(PlanError, match="Choose another layout"):
        bench.answer(replace(state, num_stages=3, cuts=()))
    # Another page does not know the plan, and says so.
    with pytest.raises(PlaygroundError, match="was not opened"):
        Workbench(bench.models).answer(state)
    bench.models["other"] = bench.models["gpt-tiny"]
    with pytest.raises(PlaygroundError, match="mean nothing for 'other'"):
        bench.answer(replace(state, model="other"))
    assert plan_of_state(state, GPT, machine, state.cuts, (), plan) == plan


def test_controls_deal_stages_out_as_the_schedule_asks():
    bench = Workbench({"chain": OfferedModel(open=lambda: lambda _: chain_graph(12, width=64))})
    state = Controls(model="chain", num_nodes=1, devices_per_node=4, num_stages=4, global_batch=32, precision="float32")
    ranks = {
        name: [stage.ranks for stage in bench.answer(replace(state, schedule=name)).plan.stages]
        for name in ("interleaved", "zb-v", "dualpipe")
    }
    assert ranks["interleaved"] == [(0, 1), (2, 3), (0, 1), (2, 3)]
    assert ranks["zb-v"] == [(0, 1), (2, 3), (2, 3), (0, 1)]
    assert ranks["dualpipe"] == [(0, 3), (1, 2), (2, 1), (3, 0)]
    for changes, words in (
        ({"schedule": "zb-v", "num_stages": 3}, "Choose 2 stages"),
        ({"schedule": "dualpipe", "replicas": (2,), "num_stages": 2}, "Give 1"),
        ({"schedule": "interleaved", "replicas": (1, 2)}, "one number for all"),
        ({"expert": 3, "num_stages": 1, "cuts": ()}, "expert ranks"),
        ({"tensor": 8, "replicas": (1,)}, "tensor times context times expert"),
    ):
        with pytest.raises(PlanError, match=words):
            bench.answer(replace(state, **changes))


def test_figures_have_tokens_of_all_and_of_one_device():
    _, data = opened(OWN, GPT)
    figures = data["figures"]
    assert figures["sequence_length"] == GPT.sequence_length
    assert figures["tokens_per_s"] == pytest.approx(figures["samples_per_s"] * GPT.sequence_length)
    assert figures["tokens_per_device_per_s"] == pytest.approx(figures["tokens_per_s"] / 4)


def test_offload_words_say_every_offload():
    for optimizer in ("device", "host", "nvme"):
        for parameters in ("device", "host"):
            if parameters == "host" and optimizer == "device":
                continue
            offload = Offload(optimizer=optimizer, parameters=parameters)
            zero = GradientExchange(zero=3)
            assert state_of_plan(replace(OWN, offload=offload, exchange=zero), Controls()).offload is not None


def test_a_stage_on_ranks_of_no_layout_is_as_planned():
    plan = replace(OWN, stages=(StagePlan(start=0, stop=len(GPT.layers), ranks=(1, 0)),), num_microbatches=16)
    assert state_of_plan(plan, Controls()).layout in ("reversed", AS_PLANNED)
