"""AccPar against brute force: what halves send each other element by element, the answer by all types and shares."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost import CostModel
from meshwright.planner.methods.unequal.accpar import (
    TYPES,
    ChainLayer,
    Half,
    baselines,
    solve_accpar,
)
from meshwright.planner.methods.unequal.accpar_chains import chain_layers, halve
from meshwright.spec import PlanError, load_cluster, load_shipped_graph
from tests.marks import examples

SIDE = 8


def owned(part, share, whole):
    """Which elements (batch, channel) of a tensor a half holds: by batch, by channel, all."""
    mine = np.zeros((SIDE, SIDE), bool)
    cut = round(share * SIDE)
    first = slice(0, cut) if whole else slice(cut, SIDE)
    if part == "all":
        mine[:] = True
    elif part == "batch":
        mine[first] = True
    else:
        mine[:, first] = True
    return mine


# What each type has of its output and needs of its input; of gradients it has those of its input.
MAKES = {"I": "batch", "II": "all", "III": "channel"}
READS = {"I": "batch", "II": "channel", "III": "all"}


def received(first, second, share, is_first):
    """Shares of F and of E that a half is sent between layers of two types, counted element by element."""
    forward = owned(READS[second], share, is_first) & ~owned(MAKES[first], share, is_first)
    # On the way back a layer has the gradient of its input as it read it, and needs that of its output as it made it.
    backward = owned(MAKES[first], share, is_first) & ~owned(READS[second], share, is_first)
    return forward.mean(), backward.mean()


def cost_of(layers, types, share, speeds, bandwidth):
    total = 0.0
    for layer, kind in zip(layers, types, strict=True):
        exchanged = {"I": layer.weight_bytes, "II": layer.output_bytes, "III": layer.input_gradient_bytes}[kind]
        work = [share * layer.seconds[0] / speeds[0], (1 - share) * layer.seconds[0] / speeds[1]]
        total += max(work) + exchanged / bandwidth
    for (a, first), (b, second) in itertools.pairwise(zip(layers, types, strict=True)):
        sent = []
        for is_first in (True, False):
            forward, backward = received(first, second, share, is_first)
            sent.append((forward * b.input_bytes + backward * a.output_gradient_bytes) / bandwidth)
        total += max(sent)
    return total


def group_of(speeds, bandwidth):
    """Two devices; layers have seconds for each."""
    return Half(kinds=(0, 1), halves=(Half(kinds=(0,)), Half(kinds=(1,))), bytes_per_s=bandwidth)


@st.composite
def chains(draw):
    sizes = st.integers(1, 40).map(float)
    layers = []
    for index in range(draw(st.integers(1, 6))):
        before, behind = draw(sizes), draw(sizes)
        layers.append(
            ChainLayer(
                name=f"l{index}",
                weight_bytes=draw(sizes),
                input_bytes=before,
                output_bytes=behind,
                input_gradient_bytes=before * draw(st.booleans()),
                output_gradient_bytes=behind,
                seconds=(draw(st.integers(1, 20)) / 4,),
            )
        )
    return layers


@settings(max_examples=examples(40), deadline=None)
@given(chains(), st.sampled_from([(1.0, 1.0), (2.0, 1.0), (1.0, 3.0)]), st.sampled_from([1.0, 8.0, 64.0]))
def test_no_types_and_shares_are_better(layers, speeds, bandwidth):
    layers = [replace(item, seconds=tuple(item.seconds[0] / speed for speed in speeds)) for item in layers]
    found = solve_accpar(layers, group_of(speeds, bandwidth))
    assert found.seconds <= table_cost(layers, found.types, found.share, bandwidth) * (1 + 1e-9)
    # 255 shares, among them all of the first grid; in between a cost of such pieces is hardly lower.
    shares = np.arange(1, 256) / 256
    ways = itertools.product(TYPES, repeat=len(layers))
    best = min(float(table_cost(layers, types, shares, bandwidth).min()) for types in ways)
    assert table_cost(layers, found.types, found.share, bandwidth) <= best * (1 + 2e-3)


def table_cost(layers, types, share, bandwidth):
    """The same sum with the fractions of the paper's table."""
    a, b = share, 1 - share
    total, most = 0.0, np.maximum(a, b)
    for layer, kind in zip(layers, types, strict=True):
        exchanged = {"I": layer.weight_bytes, "II": layer.output_bytes, "III": layer.input_gradient_bytes}[kind]
        total += np.maximum(a * layer.seconds[0], b * layer.seconds[1]) + exchanged / bandwidth
    for (x, first), (y, second) in itertools.pairwise(zip(layers, types, strict=True)):
        forward, backward = y.input_bytes, x.output_gradient_bytes
        sent = {
            ("I", "II"): a * b * (forward + backward),
            ("III", "I"): a * b * (forward + backward),
            ("I", "III"): most * forward,
            ("III", "III"): most * forward,
            ("II", "I"): most * backward,
            ("II", "II"): most * backward,
        }.get((first, second), 0.0)
        total += sent / bandwidth
    return total


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("types", list(itertools.product(TYPES, repeat=2)))
def test_what_is_sent_is_what_elements_say(types, share):
    layers = [
        ChainLayer(
            name=name,
            weight_bytes=0.0,
            input_bytes=3.0,
            output_bytes=5.0,
            input_gradient_bytes=0.0,
            output_gradient_bytes=7.0,
            seconds=(1.0, 1.0),
        )
        for name in ("a", "b")
    ]
    plain = [replace(item, seconds=(1.0,)) for item in layers]
    counted = cost_of(plain, types, share, (1.0, 1.0), 2.0)
    assert table_cost(layers, types, share, 2.0) == pytest.approx(counted)


def test_without_exchanges_the_share_is_that_of_the_speeds():
    layer = ChainLayer(
        name="l",
        weight_bytes=1.0,
        input_bytes=1.0,
        output_bytes=1.0,
        input_gradient_bytes=1.0,
        output_gradient_bytes=1.0,
        seconds=(1.0, 3.0),
    )
    found = solve_accpar([layer] * 4, group_of((1.0, 1 / 3), math.inf))
    assert found.share == pytest.approx(0.75)
    assert found.seconds == pytest.approx(3.0)
    assert "75.0% to the first" in found.explain([layer] * 4)


def test_a_cluster_is_halved_between_nodes_first():
    group = halve(load_cluster("2x4xA100"))
    assert [len(half.kinds) for half in group.halves] == [4, 4]
    cluster = load_cluster("2x4xA100")
    node = cluster.nodes[0]
    assert group.bytes_per_s == min(node.num_nics, 4) * node.nic.bandwidth_bytes_per_s
    inner = group.halves[0]
    assert inner.bytes_per_s == 2 * node.device_link.bandwidth_bytes_per_s


def test_it_beats_its_baselines_on_vgg():
    cluster = load_cluster("2x1xV100")
    layers = chain_layers(load_shipped_graph("vgg16"), 64, CostModel(cluster=cluster, precision="float32"))
    assert len(layers) == 16
    group = halve(cluster)
    best = solve_accpar(layers, group)
    others = {name: solve_accpar(layers, group, allowed).seconds for name, allowed in baselines(layers).items()}
    assert best.seconds <= min(others.values()) * (1 + 1e-9)
    assert others["HyPar"] <= min(others["data parallel"], others["one weird trick"])
    assert sum(part.share > 0 for _, part in best.levels()) == 1


def test_one_device_is_refused():
    with pytest.raises(PlanError, match="at least one layer and two devices"):
        solve_accpar([], Half(kinds=(0,)))
