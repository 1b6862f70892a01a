"""Plans of schedules that never flush, over a chain of layers."""

from dataclasses import replace
from math import lcm

from hypothesis import strategies as st

from meshwright.spec.schedules import ASYNCHRONOUS_SCHEDULES
from tests.graphs import chain_graph, even_bounds, make_plan

schedules = st.sampled_from(ASYNCHRONOUS_SCHEDULES)


def endless_plan(schedule, replicas, num_microbatches, *, frozen=0, staleness=0):
    graph = chain_graph(len(replicas), frozen=frozen)
    plan = make_plan(graph, even_bounds(len(replicas), len(replicas)), replicas, num_microbatches)
    return replace(plan, schedule=schedule, exchange=replace(plan.exchange, staleness=staleness)), graph


@st.composite
def endless_plans(draw):
    """(plan, graph) with enough microbatches for every schedule."""
    replicas = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4))
    schedule = draw(schedules)
    staleness = 0
    if schedule == "hetpipe":
        replicas, staleness = replicas[:1] * len(replicas), draw(st.integers(0, 3))
    shared = lcm(*replicas)
    count = shared * draw(st.integers(1, 3))
    if schedule == "pipedream-2bw":
        # As many as may be under way: each stage has at most those of all ranks behind it, and of its own.
        count = shared * -(-(sum(replicas) + max(replicas)) // shared)
    return endless_plan(schedule, replicas, count, frozen=draw(st.sampled_from([0, 0, 1])), staleness=staleness)
