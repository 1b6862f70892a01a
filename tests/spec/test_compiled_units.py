"""Which ops are compiled together."""

from dataclasses import replace

import pytest

from meshwright.spec import GradientExchange, GraphError, StagePlan, compiled_units
from meshwright.spec.compiled_units import AS_LAYERS, parts_of_layers, unit_starts
from meshwright.spec.exchange import Collective
from tests.graphs import chain_graph, make_plan


def test_units_are_layers():
    graph = chain_graph(3)
    assert compiled_units(graph) == ()
    assert compiled_units(replace(graph, compiled=1)) == tuple((i.start, i.stop) for i in graph.layers)


def test_what_is_computed_again_and_what_exchanges_parts_a_unit():
    graph = chain_graph(6)
    whole = replace(graph, layers=(replace(graph.layers[0], stop=6),), compiled=1)
    assert compiled_units(whole) == ((0, 6),)
    again = replace(whole, recompute=((1, 3),))
    assert compiled_units(again) == ((0, 1), (1, 3), (3, 6))
    inside, at_step = (
        Collective(kind="all_reduce", axis="tensor", phase=phase, at=at, tensor=0)
        for phase, at in (("forward", 4), ("step", 0))
    )
    exchanging = replace(again, collectives=(inside, at_step))
    assert compiled_units(exchanging) == ((0, 1), (1, 3), (3, 4), (5, 6))
    assert unit_starts(exchanging) == (0, 1, 1, 3, 4, 5)


def test_small_layers_are_joined_but_not_where_they_are_gathered():
    graph = chain_graph(40)
    joined = compiled_units(replace(graph, compiled=1))
    # Five of 40 equal weights are an eighth of them.
    assert joined == tuple((start, start + 5) for start in range(0, 40, 5))
    assert len(compiled_units(replace(graph, compiled=AS_LAYERS))) == 40
    frozen = replace(chain_graph(40, frozen=30), compiled=1)
    assert compiled_units(frozen)[:2] == ((0, 12), (12, 24)), "what is not trained delays no gradient"


def test_plans_say_what_is_cut_and_joined():
    graph = chain_graph(16)
    stages = (StagePlan(start=0, stop=2, ranks=(0, 1)), StagePlan(start=2, stop=16, ranks=(2,)))
    plan = replace(make_plan(graph, [(0, 16)], [1], 2), stages=stages)
    assert parts_of_layers(plan) == 0
    assert parts_of_layers(replace(plan, compiled=True)) == 4
    alone = replace(plan, compiled=True, stages=(replace(stages[1], start=0, ranks=(0,)),))
    assert parts_of_layers(alone) == 1
    assert parts_of_layers(replace(alone, exchange=GradientExchange(zero=3))) == AS_LAYERS


def test_a_graph_with_its_own_backward_is_not_compiled():
    graph = chain_graph(2)
    joint = replace(graph, ops=(graph.ops[0], replace(graph.ops[1], phase="backward")))
    with pytest.raises(GraphError, match="holds its own backward"):
        replace(joint, compiled=1)
