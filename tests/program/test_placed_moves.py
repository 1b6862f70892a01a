"""Stages that move: always the slices of the changed placement, cut anew."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.program.placed_moves import MovableStages
from meshwright.spec import slice_placement
from tests.marks import examples
from tests.planner.place_graphs import moved, random_graph, random_placement


@settings(max_examples=examples(100))
@given(seed=st.integers(0, 2**31), num_ops=st.integers(1, 25), num_ranks=st.integers(1, 4), trains=st.booleans())
def test_a_moved_stage_is_cut_as_if_anew(seed, num_ops, num_ranks, trains):
    rng = random.Random(seed)
    graph = random_graph(rng, num_ops, "training" if trains else "inference")
    placement = random_placement(rng, graph, num_ranks, 1)
    stages, indices = MovableStages(graph, placement), range(len(placement.stages))
    before = slice_placement(graph, placement)
    assert tuple(map(stages.slice_of, indices)) == before
    for _ in range(5):
        stage, rank = rng.choice(indices), rng.randrange(num_ranks)
        named = stages.move(stage, rank)
        placement = moved(placement, stage, rank)
        after = slice_placement(graph, placement)
        assert tuple(map(stages.slice_of, indices)) == after
        assert {index for index in indices if after[index] != before[index]} <= named
        before = after
