"""Which ops are compiled together."""

from dataclasses import replace

import pytest

from meshwright.spec import GraphError, compiled_units
from meshwright.spec.collective import Collective
from meshwright.spec.compiled_units import unit_starts
from tests.graphs import chain_graph


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


def test_a_graph_with_its_own_backward_is_not_compiled():
    graph = chain_graph(2)
    joint = replace(graph, ops=(graph.ops[0], replace(graph.ops[1], phase="backward")))
    with pytest.raises(GraphError, match="holds its own backward"):
        replace(joint, compiled=1)
