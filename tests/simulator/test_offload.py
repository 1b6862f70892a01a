"""Optimizers on the host: steps against streams played piece by piece, memory against sums by hand."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwright.simulator.plan_simulation as simulated
from meshwright.program import build_program, parameter_groups
from meshwright.simulator import simulate_plan
from meshwright.simulator.state_shards import StateShards, gather_waits
from meshwright.spec import (
    Cluster,
    ClusterError,
    GradientExchange,
    Link,
    Nvme,
    Offload,
    Opcode,
    PlanError,
    Sharding,
    StagePlan,
    load_cluster,
    load_shipped_graph,
    read_offload,
    slice_graph,
)
from tests.graphs import chain_graph, make_plan
from tests.marks import examples
from tests.program.check import check_program
from tests.simulator.plans import FixedCost, small_cluster

GPT = load_shipped_graph("gpt-tiny")
# Of a layer of `chain_graph`, in float32; AdamW reads and writes seven numbers per element in one pass.
PIECE_BYTES, PIECE_ELEMENTS, ACCESSED = 64, 16, 28
HOST, NVME = Offload(optimizer="host"), Offload(optimizer="nvme")


def described(cluster: Cluster, *, pcie=None, host=400e9, read=20e9, write=10e9, capacity=10**13) -> Cluster:
    """The cluster with hosts that are described, and issue at once."""
    changes = {} if pcie is None else {"pcie": Link(latency_s=0.0, bandwidth_bytes_per_s=pcie)}
    drives = Nvme(capacity_bytes=capacity, read_bytes_per_s=read, write_bytes_per_s=write)
    known = {"host_memory_bandwidth_bytes_per_s": host, "host_call_s": 1e-12, "nvme": drives}
    nodes = (replace(n, **known, **changes) for n in cluster.nodes)
    return replace(cluster, nodes=tuple(nodes))


@dataclass(frozen=True, slots=True, kw_only=True)
class InOrder(FixedCost):
    """Gathers and scatters of the units of `in_list`, by the number that comes first of those asked for."""

    gathers: list[float] = field(default_factory=list)
    scatters: list[float] = field(default_factory=list)
    asked: dict[str, int] = field(default_factory=dict)

    def collective_seconds(self, op, ranks, num_bytes, concurrent=(), algorithm=None, axes=()):
        number = self.asked[op] = self.asked.get(op, -1) + 1
        listed = self.gathers if op == "all_gather" else self.scatters[::-1]
        return listed[number % 3]


def in_list(graph):
    """The graph with its layers as those of a list, which makes each a unit."""
    layers = tuple(replace(layer, name=f"layers.{index}") for index, layer in enumerate(graph.layers))
    return replace(graph, layers=layers)


def end_of_updates(ready, computed, copy, step, read, write):
    """The end of all copies up and writes; ``ready`` has the moment at which the gradients of each piece are there."""
    down = host = up = read_end = 0.0
    written = []
    for moment in ready:
        down = max(down, moment) + copy
        read_end = max(read_end, computed, written[-3] if len(written) > 2 else 0.0) + read
        host = max(host, down, computed, read_end if write else 0.0) + step
        up = max(up, host) + copy
        written.append(max(written[-1] if written else 0.0, host) + write)
    return max(up, written[-1])


US = st.integers(1, 9).map(lambda number: number * 1e-6)


@settings(max_examples=examples(40))
@given(
    layers=st.integers(1, 6),
    replicas=st.integers(1, 4),
    microbatches=st.integers(1, 3),
    zero=st.sampled_from([0, 1]),
    overlap=st.booleans(),
    place=st.sampled_from([HOST, NVME]),
    forward=US,
    backward=US,
    moving=US,
    copy=US,
    step=US,
    read=US,
    write=US,
)
def test_updates_take_what_their_streams_take(
    layers, replicas, microbatches, zero, overlap, place, forward, backward, moving, copy, step, read, write
):
    graph = chain_graph(layers)
    exchange = GradientExchange(bucket_bytes=PIECE_BYTES, zero=zero, overlap=overlap)
    plan = replace(
        make_plan(graph, [(0, layers)], [replicas], microbatches * replicas), exchange=exchange, offload=place
    )
    # What a rank copies of a piece; all of its node's ranks share the host's memory and the drives.
    share = (
        PIECE_BYTES // replicas
        if zero and PIECE_BYTES % replicas == 0
        else -(-PIECE_BYTES // (replicas if zero else 1))
    )
    elements = share / 4
    states = -(-share // 4) * 8
    cluster = described(
        small_cluster(),
        pcie=share / copy,
        host=elements * ACCESSED * replicas / step,
        read=states * replicas / read,
        write=states * replicas / write,
    )
    cost = FixedCost(cluster=cluster, forward=forward, backward=backward, all_reduce=moving)
    found = simulate_plan(plan, graph, cluster, cost=cost)
    before = microbatches * layers * (forward + backward) - layers * backward
    computed = before + layers * backward
    ready = [before + backward * (place + 1) if overlap else computed for place in range(layers)]
    if replicas > 1:
        summed = 0.0
        for place_of, moment in enumerate(ready):
            ready[place_of] = summed = max(summed, moment) + moving
    on_drives = (read, write) if place is NVME else (0.0, 0.0)
    expected = end_of_updates(ready, computed, copy, step, *on_drives)
    gathers = layers * moving if zero and replicas > 1 else 0.0
    assert found.step_time_s == pytest.approx(expected + gathers, abs=1e-10)
    check_program(build_program(plan, graph))


@settings(max_examples=20)
@given(st.integers(1, 5), st.sampled_from([2, 3]), US, US, US)
def test_sharded_gradients_go_down_behind_the_last_backward(layers, zero, moving, copy, step):
    graph = chain_graph(layers)
    exchange = GradientExchange(bucket_bytes=PIECE_BYTES, zero=zero)
    plan = replace(make_plan(graph, [(0, layers)], [2], 4), exchange=exchange)
    cluster = described(small_cluster(), pcie=PIECE_BYTES / 2 / copy, host=PIECE_ELEMENTS / 2 * ACCESSED * 2 / step)
    cost = FixedCost(cluster=cluster, all_reduce=moving)
    before = simulate_plan(plan, graph, cluster, cost=cost).step_time_s
    found = simulate_plan(replace(plan, offload=HOST), graph, cluster, cost=cost).step_time_s
    assert found == pytest.approx(end_of_updates([before] * layers, before, copy, step, 0, 0), abs=1e-10)


def test_nothing_goes_down_before_all_replicas_have_scattered():
    graph = chain_graph(3)
    plan = replace(make_plan(graph, [(0, 1), (1, 3)], [2, 1], 4), exchange=GradientExchange(zero=2), offload=HOST)
    cluster = described(small_cluster())
    timeline = simulate_plan(plan, graph, cluster, cost=FixedCost(cluster=cluster)).timeline
    rank = np.array([stream.rank for stream in timeline.tracks])[timeline.track]
    computed = timeline.end_ps[(timeline.opcode == Opcode.BACKWARD) & (rank == 1)].max()
    assert computed > timeline.end_ps[(timeline.opcode == Opcode.BACKWARD) & (rank == 0)].max()
    down = timeline.start_ps[(timeline.opcode == Opcode.COPY_DOWN) & (rank == 0)]
    assert len(down) == 1
    assert (down >= computed).all()


def test_copies_hide_behind_backwards_and_steps_show():
    graph = chain_graph(4)
    plan = replace(
        make_plan(graph, [(0, 4)], [1], 1), exchange=GradientExchange(bucket_bytes=PIECE_BYTES), offload=HOST
    )

    def exposed(copy, step):
        cluster = described(small_cluster(), pcie=PIECE_BYTES / copy, host=PIECE_ELEMENTS * ACCESSED / step)
        return simulate_plan(plan, graph, cluster, cost=FixedCost(cluster=cluster)).ranks[0]

    # Backwards of 5 us per layer hide the copies down but the last; four steps on the host hide that, and all copies up
    # but one.
    shown = exposed(4e-6, 5e-6)
    assert shown.exposed_offload_s == pytest.approx(4 * 5e-6 + 4e-6, abs=1e-10)
    assert shown.offload_s == pytest.approx(3 * 4e-6 + 4 * 5e-6 + 4e-6, abs=1e-10)
    assert shown.exposed_communication_s == shown.exposed_offload_s
    # Slow copies: four down from the end of the first backward on, the last step, and the last copy up behind it.
    assert exposed(50e-6, 1e-6).exposed_offload_s == pytest.approx(4 * 50e-6 - 15e-6 + 1e-6 + 50e-6, abs=1e-10)


@settings(max_examples=8)
@given(
    place=st.sampled_from([HOST, NVME]),
    zero=st.sampled_from([0, 1, 2, 3]),
    parameters=st.booleans(),
    stages=st.sampled_from([1, 2]),
    slower=st.tuples(*[st.floats(1, 20)] * 4),
)
def test_slower_hosts_and_drives_are_never_faster(place, zero, parameters, stages, slower):
    kept = "host" if parameters and zero == 3 else "device"
    place = replace(place, parameters=kept)
    layers = len(GPT.layers)
    bounds = [(0, layers)] if stages == 1 else [(0, 2), (2, layers)]
    plan = replace(
        make_plan(GPT, bounds, [4 // stages] * stages, 8),
        exchange=GradientExchange(bucket_bytes=2**17, zero=zero),
        offload=place,
    )
    rates = {"pcie": 1e9, "host": 10e9, "read": 2e9, "write": 1e9}
    usual = described(load_cluster("4xA100"), **rates)
    slow = described(load_cluster("4xA100"), **{n: r / s for (n, r), s in zip(rates.items(), slower, strict=True)})
    fast_s, slow_s = (simulate_plan(plan, GPT, cluster).step_time_s for cluster in (usual, slow))
    assert fast_s <= slow_s
    if place.optimizer == "nvme":
        assert simulate_plan(replace(plan, offload=replace(HOST, parameters=kept)), GPT, usual).step_time_s <= fast_s


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("place", [HOST, NVME])
def test_alike_replicas_step_on_their_hosts_alike(zero, place, monkeypatch):
    layers = len(GPT.layers)
    plan = replace(
        make_plan(GPT, [(0, 2), (2, layers)], [4, 4], 8),
        stages=(
            StagePlan(start=0, stop=2, ranks=(0, 1, 2, 3)),
            StagePlan(start=2, stop=layers, ranks=(4, 5, 6, 7)),
        ),
        exchange=GradientExchange(bucket_bytes=2**17, zero=zero, clip_norm=True),
        offload=place,
    )
    cluster = described(load_cluster("8xA100"), pcie=1e9, host=10e9)
    folded = simulate_plan(plan, GPT, cluster)
    monkeypatch.setattr(simulated, "find_fold", lambda *_: None)
    whole = simulate_plan(plan, GPT, cluster)
    assert folded.fold is not None
    assert whole.fold is None
    assert folded.step_time_s == whole.step_time_s
    assert folded.memory == whole.memory
    assert folded.ranks == whole.ranks
    assert folded.nodes == whole.nodes


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_states_leave_the_device_and_are_on_the_host_or_its_drives(zero):
    layers, replicas = len(GPT.layers), 4
    plan = make_plan(GPT, [(0, layers)], [replicas], 8)
    plan = replace(plan, workload=replace(plan.workload, precision="mixed-bf16-gradients"))
    plan = replace(plan, exchange=GradientExchange(bucket_bytes=2**17, zero=zero))
    cluster = described(load_cluster("4xA100"))
    here, host, nvme = (
        simulate_plan(replace(plan, offload=Offload(optimizer=place)), GPT, cluster)
        for place in ("device", "host", "nvme")
    )
    assert here.nodes == ()
    for away in (host, nvme):
        for rank in range(replicas):
            # With states on the device, what ranks have of weights and gradients is in float32 from ZeRO 2 on.
            apart = {"optimizer states", *(("parameters", "gradients") if zero >= 2 else ())}
            assert away.memory[rank].parts["optimizer states"] == 0
            assert all(
                away.memory[rank].parts[part] == here.memory[rank].parts[part]
                for part in here.memory[rank].parts
                if part not in apart
            )
    parts = replicas if zero else 1
    trained = [GPT.tensors[i] for i in GPT.parameters if GPT.tensors[i].requires_grad]
    elements = sum(tensor.num_elements(0) for tensor in trained)
    # A master weight and two states of four bytes; two bytes of gradient, and a counter per tensor, on the host always.
    states, gradients = -(-12 * elements // parts), -(-(2 * elements + 4 * len(trained)) // parts)
    (node,) = host.nodes
    assert (node.host_bytes, node.nvme_bytes) == (replicas * (states + gradients), 0)
    (node,) = nvme.nodes
    assert node.nvme_bytes == replicas * states
    # Three pieces of at most 2^17 bytes, or a larger tensor, are at hand.
    largest = max(2**17, *(2 * tensor.num_elements(0) for tensor in trained))
    assert gradients * replicas < node.host_bytes <= replicas * (gradients + min(3 * 6 * largest // parts + 36, states))


def test_in_float32_the_host_has_the_parameters_too():
    graph = chain_graph(3)
    plan = replace(make_plan(graph, [(0, 3)], [1], 1), offload=HOST)
    cluster = described(small_cluster())
    (node,) = simulate_plan(plan, graph, cluster, cost=FixedCost(cluster=cluster)).nodes
    # Gradient, parameter, two states; AdamW's counters.
    assert node.host_bytes == 3 * (PIECE_ELEMENTS * 4 * 4 + 4)


def test_teams_take_from_their_node_what_all_of_their_devices_take():
    cluster = described(load_cluster("2x8xA100"))
    layers = len(GPT.layers)
    plan = replace(
        make_plan(GPT, [(0, layers)], [4], 8),
        offload=NVME,
        sharding=Sharding(tensor=4),
        stages=(StagePlan(start=0, stop=layers, ranks=(0, 1, 2, 3)),),
    )
    found = simulate_plan(plan, GPT, cluster)
    assert [node.ranks for node in found.nodes] == [(0, 1), (2, 3)]
    assert [node.host_limit_bytes for node in found.nodes] == [cluster.nodes[0].host_memory_bytes // 4] * 2
    assert [node.nvme_limit_bytes for node in found.nodes] == [10**13 // 4] * 2
    # A team of four devices has half of a node; two ranks alone, each with the local graph's states, take as long.
    faster = described(load_cluster("2x8xA100"), host=800e9, read=40e9, write=20e9)
    assert simulate_plan(plan, GPT, faster).step_time_s < found.step_time_s


def test_what_is_tied_within_a_rank_goes_down_once():
    graph = chain_graph(4, tied=True)
    plan = replace(
        make_plan(graph, [(0, 1), (1, 2), (2, 3), (3, 4)], [1] * 4, 4),
        schedule="interleaved",
        stages=tuple(StagePlan(start=i, stop=i + 1, ranks=(0,)) for i in range(4)),
        exchange=GradientExchange(bucket_bytes=PIECE_BYTES),
        offload=HOST,
    )
    program = build_program(plan, graph)
    names = [program.body.instruction(i) for i in range(program.body.num_instructions)]
    copies = [item for item in names if type(item).__name__ == "CopyDown"]
    assert [item.stage for item in copies] == [2, 1, 0]
    check_program(program)


@settings(max_examples=examples(50))
@given(
    gathers=st.lists(US, min_size=3, max_size=3),
    scatters=st.lists(US, min_size=3, max_size=3),
    seconds=st.lists(US, min_size=6, max_size=6),
    replicas=st.integers(1, 3),
    device=st.sampled_from(["A100", "cpu"]),
)
def test_copies_to_and_from_the_host_lengthen_gathers_and_scatters(gathers, scatters, seconds, replicas, device):
    """A pass waits as if each collective took as long as its copy besides; with one replica there are copies alone."""
    graph = in_list(chain_graph(3))
    (stage,) = slice_graph(graph, [(0, 3)])
    cluster, kind = small_cluster(), load_cluster(device).device_kind(0)
    ranks = tuple(range(replicas))
    # A rank's part has whole rows of four elements.
    copy = cluster.nodes[0].pcie.seconds(-(-4 // replicas) * 16)
    forward, backward = np.array(seconds[:3]), np.array(seconds[3:])

    def waits(own_gathers, own_scatters, *, on_host):
        cost = InOrder(cluster=cluster, gathers=own_gathers, scatters=own_scatters)
        shards = StateShards(3, ranks if on_host else (0, 1), (), on_host)
        return gather_waits(graph, stage, forward, backward, shards, kind, cost)

    none = [0.0] * 3
    found = waits(gathers if replicas > 1 else none, scatters if replicas > 1 else none, on_host=True)
    longer = [[item * (replicas > 1) + copy for item in items] for items in (gathers, scatters)]
    expected = waits(*longer, on_host=False)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-12)


@pytest.mark.parametrize("place", ["host", "nvme"])
def test_parameters_on_the_host_leave_two_units_on_the_device(place):
    layers, replicas = len(GPT.layers), 4
    plan = make_plan(GPT, [(0, layers)], [replicas], 8)
    plan = replace(plan, workload=replace(plan.workload, precision="mixed-bf16-gradients"))
    plan = replace(plan, exchange=GradientExchange(bucket_bytes=2**17, zero=3), offload=Offload(optimizer=place))
    cluster = described(load_cluster("4xA100"), pcie=1e9)
    before = simulate_plan(plan, GPT, cluster)
    found = simulate_plan(replace(plan, offload=Offload(optimizer=place, parameters="host")), GPT, cluster)
    check_program(build_program(replace(plan, offload=Offload(optimizer=place, parameters="host")), GPT))
    all_bytes = sum(GPT.tensors[i].num_bytes(0, 2) for i in GPT.parameters)
    ours, theirs = (result.memory[0].parts for result in (found, before))
    assert ours["optimizer states"] == 0
    # Those of a unit and of the root are there whole until they are scattered and go down.
    root, *units = (sum(GPT.tensors[i].num_bytes(0, 2) for i in group.trained) for group in parameter_groups(GPT))
    assert 0 < ours["gradients"] <= root + max(units)
    assert theirs["parameters"] - ours["parameters"] == -(-all_bytes // replicas)
    assert found.nodes[0].host_bytes - before.nodes[0].host_bytes == replicas * -(-all_bytes // replicas)
    assert found.nodes[0].nvme_bytes == before.nodes[0].nvme_bytes
    # Passes are longer by copies that outlast them; nothing is copied behind them.
    assert found.ranks[0].forward_s > before.ranks[0].forward_s
    assert found.ranks[0].exposed_offload_s <= before.ranks[0].exposed_offload_s
    assert not {Opcode.COPY_DOWN, Opcode.COPY_UP} & set(found.timeline.opcode.tolist())


@settings(max_examples=20)
@given(layers=st.integers(1, 5), step=US, read=US, write=US, place=st.sampled_from(["host", "nvme"]))
def test_with_parameters_on_the_host_steps_alone_follow_the_last_backward(layers, step, read, write, place):
    graph = chain_graph(layers)
    offload = Offload(optimizer=place, parameters="host")
    exchange = GradientExchange(bucket_bytes=PIECE_BYTES, zero=3)
    plan = replace(make_plan(graph, [(0, layers)], [1], 2), exchange=exchange, offload=offload)
    states = PIECE_ELEMENTS * 8
    cluster = described(
        small_cluster(), host=PIECE_ELEMENTS * ACCESSED / step, read=states / read, write=states / write
    )
    found = simulate_plan(plan, graph, cluster, cost=FixedCost(cluster=cluster))
    computed = found.ranks[0].forward_s + found.ranks[0].backward_s
    on_drives = (read, write) if place == "nvme" else (0.0, 0.0)
    expected = end_of_updates([computed] * layers, computed, 0.0, step, *on_drives)
    assert found.step_time_s == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize(
    ("exchange", "schedule", "words"),
    [
        (GradientExchange(servers=(2,)), "1f1b", "parameter servers"),
        (GradientExchange(every_steps=2), "1f1b", "every_steps"),
        (GradientExchange(across_steps=True), "1f1b", "across_steps"),
        (GradientExchange(algorithm="hierarchical", node_size=2), "1f1b", "hierarchical"),
        (GradientExchange(), "pipedream", "asynchronous schedule"),
    ],
)
def test_updates_that_are_no_single_steps_are_refused(exchange, schedule, words):
    plan = make_plan(chain_graph(3), [(0, 3)], [2], 4)
    with pytest.raises(PlanError, match=words):
        replace(plan, exchange=exchange, schedule=schedule, offload=HOST)


def test_whole_parameters_on_the_host_are_refused():
    plan = make_plan(chain_graph(3), [(0, 3)], [2], 4)
    away = Offload(optimizer="host", parameters="host")
    with pytest.raises(PlanError, match="zero = 2; expected zero = 3"):
        replace(plan, exchange=GradientExchange(zero=2), offload=away)


def test_inference_has_nothing_to_offload():
    plan = make_plan(chain_graph(3), [(0, 3)], [2], 4)
    with pytest.raises(PlanError, match="inference"):
        replace(plan, workload=replace(plan.workload, kind="inference"), offload=HOST)


def test_a_cluster_that_does_not_say_what_is_needed_is_refused():
    graph = chain_graph(3)
    plan = make_plan(graph, [(0, 3)], [2], 4)
    with pytest.raises(ClusterError, match="host_memory_bandwidth_bytes_per_s = "):
        simulate_plan(replace(plan, offload=HOST), graph, small_cluster())
    with pytest.raises(ClusterError, match="Write nvme = ") as raised:
        simulate_plan(replace(plan, offload=NVME), graph, load_cluster("2xA100"))
    # What it says to write can be read.
    given = str(raised.value).partition("Write ")[2].partition("}")[0] + "}"
    assert Nvme(**tomllib.loads(given)["nvme"]).capacity_bytes == 15 * 10**12


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        (["parameters=host"], "Add optimizer=host"),
        (["optimizer=nvme,parameters=nvme"], "expected device or host"),
        (["optimiser=host"], "did you mean 'optimizer'"),
        (["host"], "WHAT=WHERE"),
        (["optimizer=disk"], "expected device, host, nvme"),
        (["optimizer=host", "optimizer=nvme"], "on host and on nvme"),
    ],
)
def test_choices_that_are_none_are_refused(choices, words):
    with pytest.raises(PlanError, match=words):
        read_offload(choices)
    assert read_offload(["optimizer=nvme"]) == NVME
    assert read_offload([]) == Offload()
