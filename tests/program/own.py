"""Schedules as users write them, in files that tests make."""

from __future__ import annotations

import textwrap
from inspect import getsource
from pathlib import Path

from meshwright.program import with_schedule
from tests.graphs import chain_graph, even_bounds, make_plan
from tests.runtime import schedules

HEAD = "import random\n\nfrom meshwright.program import Backward, Forward, local_microbatches, num_active\n\n\n"
# Stands at the end of files, so that lines of what is tested keep their numbers.
IN_TURN = "\n\n" + getsource(schedules.in_turn)

# Both named schedules, written anew from the papers; and one that is neither.
GPIPE = """
def gpipe(plan, rank):
    (stage,) = plan.stages_of(rank)
    count, step = plan.num_microbatches, len(plan.stages[stage].ranks)
    yield from [Forward(stage=stage, microbatch=m) for m in range(count) if rank == plan.stages[stage].ranks[m % step]]
    yield from [Backward(stage=stage, microbatch=m) for m in range(count) if rank == plan.stages[stage].ranks[m % step]]
"""
ONE_F_ONE_B = """
def one_f_one_b(plan, rank):
    (stage,) = plan.stages_of(rank)
    step = len(plan.stages[stage].ranks)
    mine = [m for m in range(plan.num_microbatches) if rank == plan.stages[stage].ranks[m % step]]
    later = sum(len(item.ranks) for item in plan.stages[stage:])
    most = min((later + step - 1) // step, len(mine))
    forwards, backwards = list(mine), list(mine)
    while backwards:
        if forwards and len(backwards) - len(forwards) < most:
            yield Forward(stage=stage, microbatch=forwards.pop(0))
        else:
            yield Backward(stage=stage, microbatch=backwards.pop(0))
"""
EAGER = "\n" + getsource(schedules.eager)
# Every rank in an order of its own, which the plan's model seeds: all forwards first, or anything legal on one rank.
SHUFFLED = """
def shuffled(plan, rank):
    (stage,) = plan.stages_of(rank)
    rng = random.Random(f"{plan.model} {rank}")
    for kind in (Forward, Backward):
        mine = list(local_microbatches(plan, stage, rank))
        rng.shuffle(mine)
        for m in mine:
            yield kind(stage=stage, microbatch=m)


def mixed(plan, rank):
    (stage,) = plan.stages_of(rank)
    rng = random.Random(f"{plan.model} {rank}")
    waiting, running = list(local_microbatches(plan, stage, rank)), []
    while waiting or running:
        if waiting and (not running or rng.random() < 0.6):
            running.append(waiting.pop(0))
            yield Forward(stage=stage, microbatch=running[-1])
        else:
            yield Backward(stage=stage, microbatch=running.pop(rng.choice([0, 0, 0, -1])))
"""
ALL = HEAD + GPIPE + "\n" + ONE_F_ONE_B + "\n" + EAGER + "\n" + SHUFFLED + IN_TURN


def write_schedule(folder: Path, code: str, name: str = "mine.py") -> Path:
    """A file with what schedules need imported, and ``code``."""
    path = folder / name
    path.write_text(HEAD + textwrap.dedent(code) + IN_TURN)
    return path


def pipeline(num_stages: int = 2, num_microbatches: int = 4, **changes):
    """A graph of as many layers as stages, and its plan."""
    graph = chain_graph(num_stages)
    plan = make_plan(graph, even_bounds(num_stages, num_stages), [1] * num_stages, num_microbatches, **changes)
    return graph, plan


def plan_with(path: Path, function: str, plan):
    """The plan under a function of a file."""
    return with_schedule(plan, f"{path}:{function}")
