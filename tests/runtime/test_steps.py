"""Which sections run when: every batch enters, none twice, and what is asked wrongly is refused."""

import pytest

from meshwright.program import build_program, num_filling_steps
from meshwright.runtime import arrange_rank
from meshwright.runtime.session import EndlessSteps
from meshwright.spec import Forward, RunError
from tests.graphs import chain_graph, even_bounds, make_plan


class Played:
    """An executor that notes the microbatches of forwards, as far as it was fed."""

    def __init__(self, program, rank):
        names = ("prologue", "body", "epilogue")
        self.sections = {name: arrange_rank(program, getattr(program, name), rank) for name in names}
        self.forwards, self.fed, self.size = [], [], program.advance
        self.settled = []

    def feed(self, batch, inputs):
        self.fed.append(batch)

    def begin(self, visit):
        self.visit, self.left = visit, list(self.sections[visit.section].computations)

    def go_on(self, end=None):
        while self.left:
            instruction = self.left[0].instruction
            if isinstance(instruction, Forward):
                microbatch = instruction.microbatch + self.visit.microbatches_on
                if end is not None and microbatch >= end:
                    return False
                assert microbatch < len(self.fed) * self.size, "a forward of what was not fed"
                self.forwards.append(microbatch)
            self.left.pop(0)
        return True

    def settle(self, place=None):
        self.settled.append(place)

    def release(self):
        pass

    def restart(self):
        self.fed.clear()

    def take_outputs(self):
        return {}


def make(schedule, replicas, num_microbatches):
    graph = chain_graph(len(replicas))
    bounds = even_bounds(len(replicas), len(replicas))
    plan = make_plan(graph, bounds, list(replicas), num_microbatches, schedule=schedule)
    return plan, build_program(plan, graph)


@pytest.mark.parametrize("num_steps", [0, 1, 5])
@pytest.mark.parametrize(
    ("schedule", "replicas", "num_microbatches"),
    [
        ("pipedream", (1, 1), 1),
        ("pipedream", (1, 1, 1, 1), 2),
        ("pipedream", (3, 1), 3),
        ("pipedream-vertical", (1, 2), 4),
        ("pipedream-2bw", (1, 1, 1), 4),
        ("hetpipe", (2, 2), 4),
    ],
)
def test_every_microbatch_enters_once_and_in_order(schedule, replicas, num_microbatches, num_steps):
    plan, program = make(schedule, replicas, num_microbatches)
    filling = num_filling_steps(plan)
    for stage in plan.stages:
        for replica, rank in enumerate(stage.ranks):
            played = Played(program, rank)
            steps = EndlessSteps(played, program, rank, filling)
            for _ in range(2):
                played.forwards.clear()
                for step in range(filling + num_steps):
                    steps.run_step(7 + step, {})
                steps.finish()
                every = range((filling + num_steps) * num_microbatches)
                assert played.forwards == list(every[replica :: len(stage.ranks)])


def test_too_few_steps_and_steps_out_of_order_are_refused():
    plan, program = make("pipedream", (1, 1, 1, 1), 1)
    assert num_filling_steps(plan) == 8
    steps = EndlessSteps(Played(program, 0), program, 0, 8)
    assert steps.finish() == {}
    steps.run_step(0, {})
    with pytest.raises(RunError, match="Step 2 was given after step 0"):
        steps.run_step(2, {})
    with pytest.raises(RunError, match="was given 1 step; expected at least 8"):
        steps.finish()
