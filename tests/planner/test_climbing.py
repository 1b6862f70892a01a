"""Small changes of the best plan: the first that is better in what plans are ranked by, each once, and not too many."""

from dataclasses import replace
from functools import cache

from meshwright.planner import SearchState
from meshwright.planner.climbing import climb, moved_boundaries
from meshwright.spec import StagePlan
from tests.planner.test_search import cluster_of, search, weighted_graph


@cache
def start():
    return search(weighted_graph([10**8] * 4, mode="inference"), cluster_of(2), 8, num_stages=2).best


def numbered(number):
    """A plan that is told apart by its model's name."""
    return replace(start().plan, model=str(number))


def walk(figures, *, most=100):
    """Plans that are proposed from plan 0, whose neighbours are the next three; ``figures[n]`` are those of plan n."""
    proposed = []
    items = {number: replace(start(), plan=numbered(number), **facts) for number, facts in enumerate(figures)}

    def changes(plan):
        number = int(plan.model)
        return [numbered(n) for n in range(number + 1, number + 4) if n in items]

    steps = climb(items[0], changes, SearchState(), most=most)
    proposal = next(steps, None)
    while proposal is not None:
        proposed.append(int(proposal.plan.model))
        try:
            proposal = steps.send(items[proposed[-1]])
        except StopIteration:
            break
    return proposed


def test_the_first_better_one_is_taken_and_none_is_tried_twice():
    steps = [{"step_time_s": seconds} for seconds in (5.0, 6.0, 4.0, 7.0, 3.0, 8.0)]
    assert walk(steps) == [1, 2, 3, 4, 5]
    assert walk(steps, most=2) == [1, 2]


def test_where_latency_is_the_aim_steps_do_not_count():
    aimed = [
        {"step_time_s": step, "makespan_s": alone} for step, alone in ((5.0, 2.0), (1.0, 3.0), (9.0, 1.0), (1.0, 2.0))
    ]
    # Plan 1 has the shorter step and is no better; plan 2 is, though its step is longer, so its neighbours come next.
    assert walk([*aimed, {"step_time_s": 9.0, "makespan_s": 5.0}, {"step_time_s": 9.0, "makespan_s": 0.5}]) == [
        1,
        2,
        3,
        4,
        5,
    ]
    assert walk(aimed[:2]) == [1]


def test_boundaries_move_by_a_layer_and_leave_one_to_each():
    stages = tuple(
        StagePlan(start=a, stop=b, ranks=(i,), feeds=()) for i, (a, b) in enumerate([(0, 1), (1, 3), (3, 4)])
    )
    found = [[(stage.start, stage.stop) for stage in moved] for moved in moved_boundaries(stages)]
    assert found == [[(0, 2), (2, 3), (3, 4)], [(0, 1), (1, 2), (2, 4)]]
