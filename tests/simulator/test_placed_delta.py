"""Moves of stages: always the ends of the changed placement's program, built, estimated and simulated anew."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost import CostModel
from meshwright.program import build_placed_program
from meshwright.simulator import estimate_program
from meshwright.simulator.delta import DeltaPlacement
from meshwright.simulator.simulate import run_program
from meshwright.spec import PlanError, ProgramError, load_cluster
from tests.marks import examples
from tests.planner.place_graphs import graph_of, moved, placement_of, random_graph, random_placement
from tests.simulator.plans import FixedCost, exact_costs, small_cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class UnequalCost(FixedCost):
    """Everything takes its own time."""

    def estimate_ops(self, graph, batch_size, device_kind):
        forward = self.forward * (1 + np.arange(len(graph.ops)) % 5)
        return exact_costs(forward, 2 * forward[::-1], forward / 4)

    def collective_seconds(self, op, ranks, num_bytes, concurrent=(), algorithm=None, axes=()):
        return self.send * (1 + ranks[0] + 2 * ranks[1]) + 1e-8 * num_bytes

    def collective_host_seconds(self, op, ranks, num_bytes, axes=()):
        return self.host * (ranks == (1, 0))

    def optimizer_seconds(self, graph, parameter_ids, optimizer, device_kind, num_shards=1):
        return self.optimizer * len(parameter_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingCost(UnequalCost):
    """Raises ``left[1]`` once, when it has been asked ``left[0]`` times more."""

    left: list

    def _ask(self):
        self.left[0] -= 1
        if self.left[0] == 0:
            raise self.left[1]("no cost")

    def estimate_ops(self, *given):
        self._ask()
        return UnequalCost.estimate_ops(self, *given)

    def collective_seconds(self, *given, **facts):
        self._ask()
        return UnequalCost.collective_seconds(self, *given, **facts)

    def collective_host_seconds(self, *given, **facts):
        self._ask()
        return UnequalCost.collective_host_seconds(self, *given, **facts)

    def optimizer_seconds(self, *given, **facts):
        self._ask()
        return UnequalCost.optimizer_seconds(self, *given, **facts)


def draw_cost(rng, cluster, **facts):
    return UnequalCost(
        cluster=cluster,
        forward=rng.choice([1e-6, 3e-6]),
        send=rng.choice([0, 1e-6, 30e-6]),
        optimizer=2e-6,
        overhead=rng.choice([0, 1e-7]),
        **facts,
    )


def full_ends(placement, graph, cost):
    program = build_placed_program(placement, graph)
    return run_program(program, estimate_program(program, placement, graph, cost), 1).end_ps


def assert_equal_to_full_runs(rng, graph, placement, cost, num_moves):
    simulation = DeltaPlacement(placement, graph, cost)
    assert np.array_equal(simulation.end_ps(), full_ends(placement, graph, cost))
    followed = [simulation.is_followed]
    for _ in range(num_moves):
        stage, rank = rng.randrange(len(placement.stages)), rng.randrange(cost.cluster.num_ranks)
        before, changed = simulation.end_ps().copy(), moved(placement, stage, rank)
        simulation.move(stage, rank)
        ends = full_ends(changed, graph, cost)
        assert np.array_equal(simulation.end_ps(), ends)
        assert simulation.step_ps == ends.max()
        assert simulation.placement == changed
        if rng.random() < 0.5:
            simulation.undo()
            assert np.array_equal(simulation.end_ps(), before)
            assert simulation.placement == placement
        else:
            placement = changed
        followed.append(simulation.is_followed)
    return followed


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 2**31), num_ops=st.integers(1, 25), num_ranks=st.integers(1, 4), trains=st.booleans())
@pytest.mark.long
def test_a_move_is_that_of_the_placement_built_anew(seed, num_ops, num_ranks, trains):
    rng = random.Random(seed)
    graph = random_graph(rng, num_ops, "training" if trains else "inference")
    placement = random_placement(rng, graph, num_ranks, rng.randint(1, 3))
    cost = draw_cost(rng, small_cluster(devices=num_ranks))
    assert all(assert_equal_to_full_runs(rng, graph, placement, cost, 5))


@settings(max_examples=10)
@given(seed=st.integers(0, 2**31), takes_host=st.booleans())
def test_where_ends_depend_on_more_each_move_is_simulated_in_full(seed, takes_host):
    """Ranks of two nodes share links; or messages from rank 1 to 0 take processor time, from the first of them on."""
    rng = random.Random(seed)
    graph = random_graph(rng, 12, "training")
    cluster = small_cluster(devices=2) if takes_host else small_cluster(2, 2)
    cost = draw_cost(rng, cluster, host=1e-7 * takes_host)
    placement = random_placement(rng, graph, cluster.num_ranks, 2)
    followed = assert_equal_to_full_runs(rng, graph, placement, cost, 4)
    assert followed == sorted(followed, reverse=True)
    assert takes_host or not any(followed)


def test_where_hosts_issue_each_move_is_simulated_in_full():
    rng = random.Random(1)
    graph = random_graph(rng, 12, "training")
    cost = CostModel(cluster=load_cluster("3xH100"))
    placement = random_placement(rng, graph, 3, 2)
    assert not any(assert_equal_to_full_runs(rng, graph, placement, cost, 4))


def test_a_chain_by_hand():
    """a and b on rank 0, c on rank 1: 3 + 3 + 1 + 3 us. The same with b there too; 9 on one rank; 11 with b apart."""
    graph = graph_of({"a": ("x",), "b": ("a",), "c": ("b",)})
    cost = FixedCost(cluster=small_cluster(devices=2), forward=3e-6, send=1e-6)
    simulation = DeltaPlacement(placement_of(graph, [(0, 0), (0, 1), (1, 2)]), graph, cost)
    assert simulation.step_ps == 10 * 10**6
    for stage, rank, step_us in ((1, 1, 10), (0, 1, 9), (1, 0, 11)):
        simulation.move(stage, rank)
        assert simulation.step_ps == step_us * 10**6
    simulation.undo()
    assert simulation.step_ps == 9 * 10**6


def test_a_move_that_cannot_be_followed_is_taken_back():
    """The message from rank 1 to 0 takes processor time."""
    graph = graph_of({"a": ("x",), "b": ("a",)})
    cost = UnequalCost(cluster=small_cluster(devices=2), forward=3e-6, host=1e-6)
    placement = placement_of(graph, [(0, 0), (0, 1)])
    simulation = DeltaPlacement(placement, graph, cost)
    before = simulation.end_ps().tolist()
    simulation.move(0, 1)
    assert not simulation.is_followed
    assert np.array_equal(simulation.end_ps(), full_ends(moved(placement, 0, 1), graph, cost))
    simulation.undo()
    assert simulation.end_ps().tolist() == before == [3 * 10**6, 9 * 10**6]


def assert_unharmed(simulation, placements, graph, cost, moves, raising):
    """After a move and one that raised: all is as the first left it, it can be taken back, and both be made again."""
    (given, first, second), before = placements, simulation.end_ps().copy()
    was_followed = simulation.is_followed
    with pytest.raises(raising):
        simulation.move(*moves[1])
    assert simulation.placement == first
    assert simulation.is_followed == was_followed
    assert np.array_equal(simulation.end_ps(), before)
    simulation.undo()
    assert simulation.placement == given
    assert np.array_equal(simulation.end_ps(), full_ends(given, graph, cost))
    for made, placement in zip(moves, (first, second), strict=True):
        simulation.move(*made)
        assert np.array_equal(simulation.end_ps(), full_ends(placement, graph, cost))
    simulation.undo()
    assert np.array_equal(simulation.end_ps(), before)


def moved_twice(host):
    """A simulation, its cost model's countdown, and what `assert_unharmed` is to know; the second move is costlier."""
    wiring = {"a": ("x",), "b": ("a",), "c": ("b",), "d": ("a", "c")}
    graph = graph_of(wiring, parameters={"a": "v", "b": "w"}, mode="training")
    given, moves = placement_of(graph, [(0, op) for op in range(4)]), ((1, 2), (0, 1))
    first = moved(given, *moves[0])
    left = [0, PlanError]
    cost = FailingCost(cluster=small_cluster(devices=3), host=host, send=1e-6, optimizer=2e-6, left=left)
    simulation = DeltaPlacement(given, graph, cost)
    simulation.move(*moves[0])
    return simulation, left, ((given, first, moved(first, *moves[1])), graph, cost, moves)


@pytest.mark.parametrize("raising", [PlanError, KeyboardInterrupt])
@pytest.mark.parametrize("host", [0, 1e-7])
def test_a_move_that_raises_changes_nothing(raising, host):
    """Wherever the cost model does. With time of the host a message from rank 1 to 0 cannot be followed."""
    simulation, left, (*_, moves) = moved_twice(host)
    left[0] = 0
    simulation.move(*moves[1])
    asked = -left[0]
    assert asked > 3
    assert simulation.is_followed == (host == 0)
    for place in range(1, asked + 1):
        simulation, left, facts = moved_twice(host)
        left[:] = place, raising
        assert_unharmed(simulation, *facts, raising)


@pytest.mark.parametrize("host", [0, 1e-7])
def test_a_simulation_that_raises_changes_nothing(host):
    simulation, _, facts = moved_twice(host)

    def stop(*given):
        patch.undo()
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        called = "placement.run_unrolled" if host else "streams.DeltaStreams.change"
        patch.setattr(f"meshwright.simulator.delta.{called}", stop)
        assert_unharmed(simulation, *facts, KeyboardInterrupt)


def test_moves_that_cannot_be():
    graph = graph_of({"a": ("x",), "b": ("a",)})
    placement = placement_of(graph, [(0, 0), (1, 1)])
    simulation = DeltaPlacement(placement, graph, FixedCost(cluster=small_cluster(devices=2)))
    with pytest.raises(ProgramError, match="No move is left to take back"):
        simulation.undo()
    for stage, rank in ((0, 2), (0, -1), (len(placement.stages), 0), (-1, 0)):
        with pytest.raises(PlanError, match=f"Stage {stage} was to move to rank {rank}"):
            simulation.move(stage, rank)
    simulation.move(0, 1)
    simulation.undo()
    with pytest.raises(ProgramError, match="only the last one can be, once"):
        simulation.undo()
