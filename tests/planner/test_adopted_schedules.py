"""Plans under another schedule: the layers of a model are spread over its stages."""

from dataclasses import replace

from meshwright.cost import CostModel
from meshwright.planner import adopt_schedule
from meshwright.spec import load_cluster, load_shipped_graph
from tests.graphs import even_bounds, make_plan


def test_equal_blocks_are_spread_over_interleaved_stages():
    """Sums of equal blocks tie; a cut that crowds them into the last stages takes a step 12 % longer."""
    graph, cluster = load_shipped_graph("llama3-8b"), load_cluster("8xH100")
    plan = make_plan(graph, even_bounds(len(graph.layers), 8), [1] * 8, 32, schedule="1f1b", microbatch_size=1)
    plan = replace(plan, cluster="8xH100")
    found = adopt_schedule(plan, "interleaved", graph, CostModel(cluster=cluster), num_chunks=2)
    counts = [stage.stop - stage.start for stage in found.stages]
    assert len(counts) == 16
    assert counts[-1] == 1, "the head takes as long as some blocks"
    assert max(counts) - min(counts[:-1]) <= 1, counts
