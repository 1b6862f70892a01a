"""What runs again: the same gradients and buffers, the ops that are estimated, and less that is kept.

Plans of all policies on four ranks train as one process does; every word with one optimizer, all cases are slow.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from meshwright.capture import capture_model, part
from meshwright.runtime.checkpointing import checkpoint_ranges
from meshwright.spec import (
    PlanError,
    Recompute,
    computed_again,
    read_recompute,
    recompute_choices,
    recompute_layers,
    slice_graph,
    with_recompute,
)
from meshwright.spec.recompute import ATTENTION
from tests.runtime.matrix import assert_equal, matrix_cases, matrix_runs
from tests.runtime.models import MODELS, Case
from tests.runtime.recompute_worker import CASES, all_cases, main_cases
from tests.runtime.recompute_worker import MODELS as TRAINED


class InPlace(nn.Module):
    """An op that writes to what another made."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.first(x)
        hidden.mul_(2.0)
        return self.second(hidden.tanh())


def as_double(item):
    return item.double() if isinstance(item, torch.Tensor) and item.dtype == torch.float32 else item


def capture(case):
    case.model.double().train()
    inputs, targets = (tree_map(as_double, item) for item in case.make_batch(4))
    captured = capture_model(case.model, inputs, targets=targets, loss=case.loss, verify=False)
    return captured, [*tree_leaves(inputs), *tree_leaves(targets)]


def run(case, module, state, values):
    """Loss, gradients and buffers after a forward and a backward, and the FLOPs of the backward."""
    case.model.load_state_dict(state)
    for parameter in case.model.parameters():
        parameter.grad = None
    torch.manual_seed(3)
    loss = module(*values)[0]
    torch.rand(7)
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    grads = {name: p.grad.clone() for name, p in case.model.named_parameters() if p.grad is not None}
    buffers = {name: b.clone() for name, b in case.model.named_buffers()}
    return loss.detach(), grads, buffers, counter.get_total_flops()


def layers_again(part):
    return lambda graph: Recompute(recompute_layers(graph, range(len(graph.layers))[part]))


# "everything" keeps all that can be kept.
AGAIN = {
    "all": layers_again(slice(None)),
    "some": layers_again(slice(1, 3)),
    "op": lambda graph: read_recompute(graph, "op"),
    "attention": lambda graph: recompute_choices(graph)["attention"],
    "everything": lambda graph: read_recompute(graph, "keep=*"),
}


@pytest.mark.parametrize("word", AGAIN)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.matrix
def test_gradients_buffers_and_flops(name, word):
    torch.manual_seed(5)
    case = MODELS[name]()
    captured, values = capture(case)
    ranges, keeps = AGAIN[word](captured.graph)
    graph = with_recompute(captured.graph, ranges, keeps)
    (stage,) = slice_graph(graph, [(0, len(graph.layers))])
    state = {key: value.clone() for key, value in case.model.state_dict().items()}
    plain, again = (part(captured, graph.inputs, stage.outputs, batch_size=4, ops=stage.ops) for _ in range(2))
    again = checkpoint_ranges(again, graph, stage.ops)
    wanted = run(case, plain, state, values)
    found = run(case, again, state, values)
    assert torch.equal(found[0], wanted[0])
    for ours, theirs in zip(found[1:3], wanted[1:3], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    # Torch counts nothing for the kernel of attention that processors have.
    again = [graph.ops[op] for r in ranges for op in computed_again(graph, *r)]
    expected = sum(op.flops.at(4) for op in again if not op.kind.startswith(ATTENTION))
    assert expected > 0 or word != "all"
    assert found[3] - wanted[3] == pytest.approx(expected, rel=0.35), "what runs again is what is estimated"


def test_less_is_kept():
    torch.manual_seed(5)
    case = MODELS["gpt"]()
    captured, values = capture(case)
    whole = captured.graph
    graph = with_recompute(whole, recompute_layers(whole, range(len(whole.layers))))
    (stage,) = slice_graph(graph, [(0, len(graph.layers))])
    kept = []
    for again in (False, True):
        module = part(captured, graph.inputs, stage.outputs, batch_size=4, ops=stage.ops)
        module = checkpoint_ranges(module, graph, stage.ops) if again else module
        kept.append(held_bytes(lambda module=module: module(*values)[0]))
    assert kept[1] < 0.4 * kept[0]


def held_bytes(forward):
    """Bytes of tensors that a graph of autograd keeps."""
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda item: seen.append(item) or item, lambda item: item):
        loss = forward()
    assert loss.requires_grad
    storages = {item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in seen}
    return sum(storages.values())


def test_what_would_be_written_twice_is_refused():
    case = Case(InPlace(), nn.functional.mse_loss, lambda n: ((torch.randn(n, 4),), (torch.randn(n, 4),)))
    captured, _ = capture(case)
    op = next(i for i, item in enumerate(captured.graph.ops) if item.kind.startswith("aten.mul_"))
    graph = replace(captured.graph, recompute=((op, op + 2),))
    (stage,) = slice_graph(graph, [(0, len(graph.layers))])
    module = part(captured, graph.inputs, stage.outputs, batch_size=4, ops=stage.ops)
    with pytest.raises(PlanError, match="so recomputing would read the new value"):
        checkpoint_ranges(module, graph, stage.ops)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return matrix_runs("tests.runtime.recompute_worker", tmp_path_factory.mktemp("recompute"), timeout_s=500)


@pytest.mark.distributed
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("which", "world_size", "case"), matrix_cases(CASES, TRAINED, main_cases, all_cases))
def test_state_and_losses_are_those_of_one_process(results, which, world_size, case):
    assert_equal(results(which, world_size)[case])
