"""Memory of a stage: by hand, and against a real training step."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.capture import capture_model
from meshwright.cost import CostModel, StageMemory
from meshwright.cost.memory import count_phases, likeness, weigh_stage
from meshwright.spec import GraphError, Optimizer, Workload, load_shipped_graph, shipped_graphs, slice_graph
from tests.cost.facts import B, GraphMaker, make_cluster
from tests.graphs import chain_graph

ADAMW = Optimizer(kind="adamw")
FLOATS = 16 * 4  # bytes of a weight of `chain_graph`
NOTHING = count_phases({}, gradient_bytes=0, sent_bytes=0, workspace_bytes=0)


def weigh(graph, bounds, stage, batch_size, **settings):
    workload = Workload(global_batch=batch_size, **settings)
    return CostModel(cluster=make_cluster()).stage_memory(
        graph, slice_graph(graph, bounds)[stage], batch_size, workload
    )


def test_a_middle_stage_by_hand():
    # Layers 1 and 2 of a chain: each saves its input; layer 1's is received, layer 3 gets the output of layer 2.
    memory = weigh(chain_graph(4), [(0, 1), (1, 3), (3, 4)], 1, 5, optimizer=ADAMW)
    assert replace(memory, phases=NOTHING) == StageMemory(
        parameter_bytes=2 * FLOATS,
        buffer_bytes=0,
        gradient_bytes=2 * FLOATS,
        optimizer_bytes=2 * 2 * FLOATS + 2 * 4,
        saved_bytes=5 * 16,
        received_bytes=5 * 16,
        input_bytes=0,
        sent_bytes=5 * 16,
        phases=NOTHING,
    )
    assert memory.static_bytes == 6 * FLOATS + 8
    value = 5 * 16
    # The forward makes two values, both kept; the backward of layer 2 takes gradients of its weight and its input, that
    # of layer 1 (when the value between is gone) of its own.
    forward, first, later = memory.phases.forward, memory.phases.first, memory.phases.later
    assert (forward.most_bytes, forward.after_bytes, memory.microbatch_bytes) == (2 * value, 2 * value, 3 * value)
    assert first.most_bytes == max(FLOATS + value, 2 * FLOATS + value)
    assert first.after_bytes == 2 * FLOATS - 2 * value + value
    assert later.most_bytes == FLOATS + value
    # AdamW goes over the weights one by one and takes two copies of each.
    assert (memory.phases.optimizer.most_bytes, memory.phases.optimizer.after_bytes) == (2 * FLOATS, -2 * FLOATS)
    assert memory.peak_bytes(1) == memory.static_bytes + max(3 * value + 2 * FLOATS + value, 2 * FLOATS + 2 * FLOATS)
    assert memory.peak_bytes(3) == memory.static_bytes + 9 * value + 2 * FLOATS + value
    assert memory.peak_bytes(1, 4) == memory.static_bytes + 3 * value + 2 * FLOATS + FLOATS + value


def test_the_first_stage_reads_its_input_and_the_last_yields_the_loss():
    first = weigh(chain_graph(2), [(0, 1), (1, 2)], 0, 1)
    assert (first.input_bytes, first.received_bytes, first.saved_bytes, first.sent_bytes) == (16, 0, 0, 16)
    last = weigh(chain_graph(2), [(0, 1), (1, 2)], 1, 1)
    assert (last.input_bytes, last.received_bytes, last.saved_bytes, last.sent_bytes) == (0, 16, 0, 4)


def test_frozen_weights_have_neither_gradient_nor_states():
    memory = weigh(chain_graph(3, frozen=2), [(0, 3)], 0, 1, optimizer=ADAMW)
    assert (memory.parameter_bytes, memory.gradient_bytes) == (3 * FLOATS, FLOATS)
    assert memory.optimizer_bytes == 2 * FLOATS + 4


def test_inference_keeps_nothing_for_a_backward():
    memory = weigh(chain_graph(3), [(0, 3)], 0, 1, kind="inference")
    assert (memory.gradient_bytes, memory.optimizer_bytes, memory.saved_bytes) == (0, 0, 0)
    # A value and the one made from it; nothing stays, nothing is stepped.
    assert (memory.phases.forward.most_bytes, memory.phases.forward.after_bytes) == (2 * 16, 0)
    assert all(not any(phase.most) for phase in (memory.phases.first, memory.phases.later, memory.phases.optimizer))


@pytest.mark.parametrize(
    ("optimizer", "states"), [(Optimizer(kind="sgd"), 0), (Optimizer(kind="sgd", momentum=True), 1)]
)
def test_sgd_has_a_state_only_with_momentum(optimizer, states):
    assert weigh(chain_graph(1), [(0, 1)], 0, 1, optimizer=optimizer).optimizer_bytes == states * FLOATS


def test_mixed_precision_halves_what_flows_and_adds_a_master_copy():
    full = weigh(chain_graph(4), [(0, 4)], 0, 2, optimizer=ADAMW)
    mixed = weigh(chain_graph(4), [(0, 4)], 0, 2, optimizer=ADAMW, precision="mixed-bf16-gradients")
    for name in ("parameter_bytes", "gradient_bytes", "saved_bytes", "input_bytes", "microbatch_bytes"):
        assert 2 * getattr(mixed, name) == getattr(full, name)
    assert mixed.optimizer_bytes == 4 * 3 * FLOATS + 4 * 4


@pytest.mark.parametrize(
    ("precision", "parameters", "gradients", "states"),
    [
        ("float64", 8, 8, 16),
        ("float32", 4, 4, 8),
        ("mixed", 2, 4, 12),
        ("mixed-bf16-gradients", 2, 2, 12),
        ("mixed-float16", 2, 4, 12),
        ("bfloat16", 2, 2, 4),
    ],
)
def test_a_precision_says_the_bytes_of_a_parameter(precision, parameters, gradients, states):
    memory = weigh(chain_graph(1), [(0, 1)], 0, 1, optimizer=ADAMW, precision=precision)
    assert memory.parameter_bytes == parameters * FLOATS // 4
    assert memory.gradient_bytes == gradients * FLOATS // 4
    assert memory.optimizer_bytes == states * FLOATS // 4 + 4


def test_a_storage_that_several_ops_keep_counts_once():
    make = GraphMaker()
    x = make.tensor("x", (B, 8), role="input", grad=False)
    y = make.tensor("y", (B, 8))
    make.op("aten.exp.default", (x,), (y,), saved=(y,))
    view = make.tensor("view", (8, B), storage=y)
    make.op("aten.t.default", (y,), (view,))
    z = make.tensor("z", (8, B))
    make.op("aten.mul.Tensor", (view, view), (z,), saved=(view, view))
    graph = make.graph()
    assert weigh(graph, [(0, 3)], 0, 3).saved_bytes == 3 * 8 * 4


def test_a_batch_that_the_graph_does_not_describe_is_refused():
    graph = chain_graph(1)
    fixed = type(graph)(
        **{name: getattr(graph, name) for name in ("name", "tensors", "ops", "layers", "inputs", "outputs")},
        batch_size=2,
    )
    with pytest.raises(GraphError, match="batch of 3"):
        weigh(fixed, [(0, 1)], 0, 3)


class Perceptron(nn.Module):
    """Layers that keep inputs, outputs, masks and statistics."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.norm = nn.LayerNorm(256)
        self.second = nn.Linear(256, 256)
        self.last = nn.Linear(256, 10)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        x = nn.functional.gelu(self.second(x)) + x
        return self.last(torch.nn.functional.dropout(x, 0.1))


class LiveBytes(TorchDispatchMode):
    """Follows every storage that torch makes until it is freed: an account of live bytes that knows no graph."""

    def __init__(self, known):
        super().__init__()
        self.known = {item.untyped_storage()._cdata for item in known}
        self.storages, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for item in pytree.tree_leaves(out):
            if isinstance(item, torch.Tensor) and item.untyped_storage()._cdata not in self.known:
                storage = item.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.live())
        return out

    def live(self):
        self.storages = {key: entry for key, entry in self.storages.items() if not entry[0].expired()}
        return sum(size for _, size in self.storages.values())


def test_a_real_step_needs_what_was_predicted():
    torch.manual_seed(0)
    model, batch_size = Perceptron(), 512
    batch, labels = torch.randn(batch_size, 64), torch.randint(10, (batch_size,))
    captured = capture_model(model, batch, targets=labels, loss=nn.functional.cross_entropy, verify=False)
    stages = slice_graph(captured.graph, [(0, len(captured.graph.layers))])
    workload = Workload(global_batch=batch_size, optimizer=ADAMW)
    predicted = CostModel(cluster=make_cluster()).stage_memory(captured.graph, stages[0], batch_size, workload)

    optimizer = torch.optim.AdamW(model.parameters())
    with LiveBytes([*model.parameters(), batch, labels]) as account:
        loss = nn.functional.cross_entropy(model(batch), labels)
        after_forward = account.live()
        loss.backward()
        after_backward = account.live()
        peak = account.peak
        optimizer.step()
    states = [item for state in optimizer.state.values() for item in state.values()]
    assert predicted.parameter_bytes == sum(item.nbytes for item in model.parameters())
    assert predicted.input_bytes == batch.nbytes + labels.nbytes
    assert predicted.optimizer_bytes == sum(item.nbytes for item in states)
    assert after_backward - loss.nbytes == predicted.gradient_bytes
    assert after_forward == predicted.saved_bytes + predicted.sent_bytes
    # That of computing, before the optimizer's states are there; a hook sees no more than each op's result.
    computing = max(predicted.phases.forward.most_bytes, after_forward + predicted.phases.first.most_bytes)
    assert peak == pytest.approx(computing, rel=0.02)


@pytest.mark.parametrize("name", [name for name in shipped_graphs() if name.endswith("-tiny")])
@pytest.mark.matrix
def test_stages_that_are_alike_weigh_the_same(name):
    graph = load_shipped_graph(name)
    workload = Workload(global_batch=8, optimizer=ADAMW)
    layers, found = len(graph.layers), {}
    for i, j in itertools.combinations(range(layers + 1), 2):
        bounds = [bound for bound in ((0, i), (i, j), (j, layers)) if bound[0] < bound[1]]
        stage = slice_graph(graph, bounds)[bounds.index((i, j))]
        memory = weigh_stage(graph, stage, graph.batch_size or 2, workload)
        assert found.setdefault(likeness(graph, stage), memory) == memory, (i, j)
    # Repeated blocks are told by the first of them.
    blocks = [layer.block for layer in graph.layers]
    if any(blocks[k : k + 3] == [blocks[k]] * 3 for k in range(1, layers - 3)):
        assert len(found) < layers * (layers + 1) // 2
