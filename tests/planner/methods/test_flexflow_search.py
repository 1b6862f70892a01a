"""The SOAP space of graphs, and its search: against closed forms, enumerations and itself."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.soap_optimum import count_strategies, find_optimum, list_configurations

from meshwright.cost import CostModel
from meshwright.planner.methods.flexflow import (
    read_strategy,
    search_soap,
    soap_space,
)
from meshwright.planner.methods.flexflow.chain import ACCEPTED, SIMULATED, empty_chain, start, walk
from meshwright.planner.methods.flexflow.configure import configure_all
from meshwright.planner.methods.flexflow.full import shortest_tails, simulate_all
from meshwright.planner.methods.flexflow.layers import find_layers
from meshwright.planner.methods.flexflow.soap_arrays import empty_schedule, empty_strategy
from meshwright.planner.methods.flexflow.soap_chains import STARTS, data_parallel
from meshwright.planner.methods.flexflow.temperature import adjust, calibrate
from meshwright.spec import DocumentError, PlanError, Workload, load_cluster, load_shipped_graph
from tests.graphs import chain_graph
from tests.planner.methods.soap_oracle import simulate
from tests.planner.methods.soap_problems import draw_problem, make_soap

pytestmark = pytest.mark.long


def make_space(name="resnet-tiny", devices="4xA100", batch=16, **options):
    cluster = load_cluster(devices)
    graph = name if not isinstance(name, str) else load_shipped_graph(name)
    return soap_space(graph, cluster, Workload(global_batch=batch), CostModel(cluster=cluster), **options)


def kinds(layer):
    return [(dim.kind, dim.size) for dim in layer.dims]


def test_layers_of_resnet_are_its_products_pools_and_loss():
    graph = load_shipped_graph("resnet50")
    layers = find_layers(graph, 64)
    names = [graph.ops[layer.ops[0]].kind.split(".")[1] for layer in layers]
    assert {name: names.count(name) for name in names} == {
        "conv2d": 53,
        "max_pool2d": 1,
        "mean": 1,
        "linear": 1,
        "cross_entropy_loss": 1,
    }
    assert sorted(op for layer in layers for op in layer.ops) == list(range(len(graph.ops)))
    assert kinds(layers[0]) == [("sample", 64), ("attribute", 112), ("attribute", 112), ("parameter", 64)]
    head = next(layer for layer in layers if layer.name == "head")
    assert kinds(head) == [("sample", 64), ("parameter", 1000)]
    assert kinds(layers[-1]) == [("sample", 64)]


TINY = ["gpt-tiny", "unet-tiny", "gnmt-tiny", "dlrm-tiny", "mixtral-tiny", "t5-tiny", "vgg-tiny"]


@pytest.mark.parametrize("name", TINY)
def test_every_layer_reads_earlier_ones_and_every_op_has_one(name):
    graph = load_shipped_graph(name)
    layers = find_layers(graph, 8)
    home = {op: at for at, layer in enumerate(layers) for op in layer.ops}
    assert sorted(home) == [op for op, item in enumerate(graph.ops) if not item.replicable]
    assert len(home) == sum(len(layer.ops) for layer in layers)
    maker = {tensor: op for op in home for tensor in graph.ops[op].outputs}
    assert all(home[maker[t]] <= home[op] for op in home for t in graph.ops[op].inputs if t in maker)
    for layer in layers:
        for dim in layer.dims:
            for tensor, (place, parts) in dim.places.items():
                assert graph.tensors[tensor].shape[place].at(8) % parts == 0


def test_parts_are_estimated_at_their_own_size():
    """The whole layer costs what its ops cost; a part no more than that."""
    space = make_space("resnet50", "2xA100", 32)
    cost, soap, graph = CostModel(cluster=space.cluster), space.soap, space.graph
    costs = cost.estimate_ops(graph, 32, space.cluster.device_kind(0))
    readers = Counter(i for op in graph.ops for i in op.inputs)
    exact = 0
    for at, layer in enumerate(space.layers):
        rows = slice(soap.candidates[at], soap.candidates[at + 1])
        alone = soap.pass_ps[rows][soap.parts[rows] == 1][0, 0]
        whole = [sum(costs.forward_s[layer.ops]), sum(costs.backward_s[layer.ops])]
        assert alone[0] == pytest.approx(whole[0] * 1e12, rel=1e-9, abs=2)
        # Gradients of a value that several layers read are summed, which is a part of none.
        summed = any(readers[i] > 1 for op in layer.ops for i in (*graph.ops[op].inputs, *graph.ops[op].outputs))
        exact += not summed
        assert alone[1] == pytest.approx(whole[1] * 1e12, rel=0.4 if summed else 1e-9, abs=2)
        assert alone[1] <= whole[1] * 1e12 + 2
        assert (soap.pass_ps[rows, 0] <= alone * 1.0001 + 1).all()
    assert exact >= 20


def test_a_convolution_reads_the_edges_of_its_neighbours_parts():
    space = make_space("resnet50", "2xA100", 32)
    names = [layer.name for layer in space.layers]
    edge = next(e for e in range(len(space.soap.source)) if names[space.soap.target[e]] == "blocks.0.convolution2")
    assert space.soap.window[edge].tolist() == [[32, 1, 0, 1], [64, 1, 0, 1], [56, 1, 1, 3], [56, 1, 1, 3]]
    assert space.soap.read_by[edge].tolist() == [0, -1, 1, 2]
    soap = space.soap
    rows = soap.candidates[:-1].copy()
    for layer in (soap.source[edge], soap.target[edge]):
        own = range(soap.candidates[layer], soap.candidates[layer + 1])
        rows[layer] = next(r for r in own if soap.degrees[r].tolist() == [1, 2, 1, 1])
    strategy, schedule = empty_strategy(soap), empty_schedule(soap)
    configure_all(soap, strategy, rows, np.tile([0, 1], (len(rows), 1)))
    simulate_all(soap, strategy, schedule)
    order = schedule.order[: schedule.num_run[0]]
    first = 4 * len(names) + 4 * edge
    forward = [int(t) - first for t in order if first <= t < first + 4]
    # Part 0 sends a row of 32 x 64 x 56 numbers to part 1, and the other way round.
    assert sorted(forward) == [1, 2]
    expected = soap.latency_ps[0, 1] + int(32 * 64 * 56 * 4 * soap.byte_ps[0, 1])
    assert strategy.task[first + 1, 0] == expected


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_search_finds_the_optimum_of_small_spaces(seed, barrier):
    random = np.random.default_rng(seed)
    problem = draw_problem(random, num_layers=3, num_devices=2, barrier=barrier, most_ps=1000)
    soap = make_soap(problem)
    best, (rows, devices) = find_optimum(soap)
    found = [(int(row - soap.candidates[o]), devices[o, : soap.parts[row]]) for o, row in enumerate(rows)]
    assert simulate(problem, found)[0] == best
    steps = []
    for _ in range(20):
        drawn = []
        for layer in range(3):
            own, places = list_configurations(soap, layer)
            k = random.integers(len(own))
            drawn.append((int(own[k] - soap.candidates[layer]), places[k, : soap.parts[own[k]]]))
        steps.append(simulate(problem, drawn)[0])
    assert min(steps) >= best


def test_chains_are_within_two_percent_of_the_optimum():
    space = make_space(chain_graph(4, width=512), "3xA100", 12)
    best, _ = find_optimum(space.soap)
    result = search_soap(space, num_proposals=4000)
    assert best <= result.step_s * 1e12 * (1 + 1e-9) <= 1.02 * best


def test_a_walk_that_cuts_simulations_short_goes_the_same_way():
    space = make_space("resnet-tiny", "4xA100", 16)
    tails, ends = shortest_tails(space.soap), []
    for cut in (False, True):
        chain = empty_chain(space.soap)
        start(space.soap, chain, *data_parallel(space))
        walk(space.soap, chain, np.random.default_rng(3), tails, 1500, 1e-8, cut)
        ends.append((chain.strategy.candidate.tolist(), chain.step_ps.tolist(), chain.tally[:4].tolist()))
    assert ends[1] == ends[0]
    assert ends[0][2][SIMULATED] == 1500
    assert 0 < ends[0][2][ACCEPTED] < 1500


def test_the_same_seed_gives_the_same_answer():
    space = make_space("resnet-tiny", "4xA100", 16)
    results = [search_soap(space, num_proposals=600, seed=seed) for seed in (1, 1, 2)]
    assert results[0].document() == results[1].document()
    assert results[0].history == results[1].history
    assert results[0].tally != results[2].tally
    assert results[0].num_simulated == 600
    assert results[0].starts.keys() == {*STARTS, "the best of these"}


def test_a_result_is_what_a_simulation_of_its_document_says():
    space = make_space("gpt-tiny", "2x2xA100", 8)
    result = search_soap(space, num_proposals=500)
    rows, devices = read_strategy(space, json.loads(json.dumps(result.document())))
    strategy, schedule = empty_strategy(space.soap), empty_schedule(space.soap)
    configure_all(space.soap, strategy, rows, devices)
    assert simulate_all(space.soap, strategy, schedule) == round(result.step_s * 1e12)
    assert "proposals simulated" in result.explain()
    assert len(result.configurations()) == len(space.layers)


def test_one_device_has_one_strategy():
    space = make_space("resnet-tiny", "A100", 4)
    assert count_strategies(space.soap) == 1
    result = search_soap(space, num_proposals=10)
    assert result.num_simulated == 0
    assert result.step_s * 1e12 == pytest.approx(space.soap.pass_ps[:, 0].sum() + space.soap.update_ps.sum())


def test_a_barrier_never_makes_a_step_shorter():
    steps = []
    for overlap in (True, False):
        space = make_space("resnet50", "8xA100", 64, overlap=overlap)
        strategy = empty_strategy(space.soap)
        configure_all(space.soap, strategy, *data_parallel(space))
        steps.append(simulate_all(space.soap, strategy, empty_schedule(space.soap)))
    assert steps[0] < steps[1]


@given(st.lists(st.floats(1e3, 1e12), min_size=1, max_size=50), st.floats(0.001, 0.5))
def test_calibration_accepts_the_share_asked_for(rises, share):
    beta = calibrate(np.array(rises), share)
    assert np.exp(-beta * np.array(rises)).mean() == pytest.approx(share, rel=1e-3)


def test_temperature_follows_what_is_accepted():
    assert adjust(1.0, 50, 100) > 1.0 > adjust(1.0, 0, 100)
    assert adjust(1.0, 2, 100) == 1.0
    assert calibrate(np.zeros(0)) == 0.0


def test_bad_input_is_refused():
    space = make_space("resnet-tiny", "2xA100", 4)
    for budget in ({}, {"num_proposals": 0}, {"num_proposals": 5, "seconds": 1.0}, {"seconds": -1.0}):
        with pytest.raises(PlanError, match="expected a positive number"):
            search_soap(space, **budget)
    with pytest.raises(PlanError, match="expected at most"):
        find_optimum(make_space("resnet50", "8xA100", 64).soap)
    document = search_soap(space, num_proposals=20).document()
    with pytest.raises(DocumentError, match="Search again"):
        read_strategy(space, {**document, "schema": "other"})
    document["layers"][0]["devices"] = [7]
    with pytest.raises(DocumentError, match="devices 0 to 1"):
        read_strategy(space, document)
