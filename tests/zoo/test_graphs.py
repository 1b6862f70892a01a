"""The graphs that ship are those that capture makes now, for every name of the zoo."""

import pytest

from meshwright.cli.model_arguments import capture_reference
from meshwright.cost.memory import weigh_stage
from meshwright.spec import Workload, load_shipped_graph, shipped_graphs, slice_graph
from meshwright.zoo import zoo_names

# Beside the tiny ones; `make test-all` captures every name.
QUICK = ("gpt2-small", "resnet50", "bert-base", "dlrm")


def test_every_name_has_its_graph():
    assert shipped_graphs() == zoo_names(), "run scripts/renew_graphs.py"


def by_size(name):
    quick = name.endswith("-tiny") or name in QUICK
    return pytest.param(name, marks=pytest.mark.long if quick else pytest.mark.slow)


@pytest.mark.parametrize("name", [by_size(name) for name in shipped_graphs()])
def test_the_shipped_graph_is_what_capture_makes(name):
    captured = capture_reference(name, ()).graph
    shipped = load_shipped_graph(name)
    assert captured.content_hash == shipped.content_hash, f"run scripts/renew_graphs.py {name}"
    assert captured == shipped


def test_of_a_frozen_base_only_adapters_have_gradients_and_optimizer_states():
    graph = load_shipped_graph("llama3-8b-lora")
    (stage,) = slice_graph(graph, [(0, len(graph.layers))])
    memory = weigh_stage(graph, stage, 1, Workload(global_batch=1, precision="mixed"))
    adapters = [graph.tensors[i] for i in graph.parameters if graph.tensors[i].requires_grad]
    assert len(adapters) == 2 * 7 * 32
    assert memory.parameter_bytes == 2 * 8_072_204_288
    assert memory.gradient_bytes == 4 * 41_943_040
    # Master weight and two moments in float32, and AdamW's counter of steps for every tensor.
    assert memory.optimizer_bytes == 12 * 41_943_040 + 4 * len(adapters)
