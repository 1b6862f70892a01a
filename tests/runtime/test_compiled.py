"""Layers that torch compiles train as they do without, and their gradients leave in the same order and early enough."""

import warnings
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch._inductor.utils import fresh_cache

from meshwright.capture import capture_model, part
from meshwright.runtime import Compilation
from meshwright.runtime.checkpointing import checkpoint_ranges
from meshwright.runtime.compiling import compile_units
from meshwright.spec import compiled_units
from tests.rank_results import read_results
from tests.runtime.compiled_worker import CASES

pytestmark = [pytest.mark.compiler, pytest.mark.long]
NAMES = [f"{model}, {layout}" for model, layout in CASES]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return read_results("tests.runtime.compiled_worker", 2, tmp_path_factory.mktemp("compiled"), timeout_s=1200)


@pytest.mark.timeout(1260)
@pytest.mark.distributed
@pytest.mark.parametrize("name", NAMES)
def test_losses_are_those_of_layers_that_are_not_compiled(results, name):
    eager, compiled = results[name]
    assert compiled["losses"] == pytest.approx(eager["losses"], rel=1e-4)
    assert compiled["losses"] != eager["losses"] or "resnet, again" in name, "nothing was compiled"


@pytest.mark.distributed
@pytest.mark.parametrize("name", NAMES)
def test_every_layer_is_compiled(results, name):
    eager, compiled = results[name]
    units, codes, done = compiled["units"]
    assert eager["units"] == [0, 0, 0]
    assert compiled["left out"] == {}
    assert units > 0
    assert codes == done
    # Blocks that are alike share one compilation; a VGG has none.
    assert codes < units or units < 3 or "again" in name or "vgg" in name


@pytest.mark.distributed
@pytest.mark.parametrize("name", NAMES)
def test_sums_leave_in_the_order_of_the_program(results, name):
    for found in results[name]:
        assert found["sums"] == found["wanted"]


@pytest.mark.distributed
def test_most_of_an_exchange_is_still_hidden(results):
    """Of an exchange in equal buckets that takes as long as the last backward; none where all leave at its end."""
    assert all(_hidden(found["leads"]) > 0.5 for found in results["gpt, buckets"])


def _hidden(leads):
    """The share that is over before the backward is; ``leads``: of a backward, left when each bucket was ready."""
    each, now = 1 / len(leads), 0.0
    for lead in leads:
        now = max(now, 1 - lead) + each
    return 2 - now


def test_a_layer_that_torch_cannot_compile_runs_as_it_is():
    """Forward and backward; a lone product needs no compiler but for the gradient of its bias."""
    torch.manual_seed(0)
    module, graph, inputs = whole(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), torch.randn(4, 8))
    compilation = Compilation()
    wanted = gradients(module, inputs)
    compiled = compile_units(module, graph, compilation)
    # With errors for warnings, torch stops at one of its own while it prepares its message.
    lacking = torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)})
    with warnings.catch_warnings(action="ignore"), fresh_cache(), lacking:
        found = gradients(compiled, inputs)
    for own, other in zip(found, wanted, strict=True):
        assert torch.equal(own, other)
    ((reason, count),) = compilation.left_out.items()
    assert "No working C++ compiler" in reason
    assert count == compilation.num_units == len(compiled_units(graph))


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_many_different_units_are_compiled_again():
    """Torch stops after eight compilations of one function."""
    torch.manual_seed(0)
    blocks = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(4 + i, 5 + i), torch.nn.Tanh()) for i in range(10))
    )
    module, graph, inputs = whole(blocks, torch.randn(4, 4), again=True)
    wanted, compilation = gradients(module, inputs), Compilation()
    compiled = gradients(compile_units(module, graph, compilation), inputs)
    assert compilation.left_out == {}
    assert compilation.num_codes >= 10
    for own, other in zip(compiled, wanted, strict=True):
        torch.testing.assert_close(own, other)


class Rewriting(torch.nn.Module):
    """Two products, between them what is written in place."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 12), torch.nn.Linear(12, 6)

    def forward(self, x):
        return x + self.down(torch.sigmoid(self.up(x)).mul(2.0).sub_(1.0).tanh()).exp().tanh()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_units_keep_the_results_that_a_plan_names_and_no_others():
    torch.manual_seed(0)
    blocks, x = torch.nn.Sequential(*(Rewriting() for _ in range(3))).double(), torch.randn(8, 6, dtype=torch.float64)
    saved, found, ends = {}, {}, "aten.add.Tensor"
    for compiled in (False, True):
        for keeps in (False, True):
            module, graph, inputs = whole(blocks, x, again=ends, keeps="aten.linear.default" if keeps else None)
            compilation = Compilation()
            if compiled:
                compile_units(module, graph, compilation)
                gradients(module, inputs)
                assert compilation.left_out == {}
                assert compilation.num_units >= 3
                assert compilation.num_codes < compilation.num_units
            own = {item.data_ptr() for item in (*module.parameters(), *module.buffers(), *inputs)}
            seen = {}

            def note(item, own=own, seen=seen):
                if item.data_ptr() not in own:
                    seen[item.untyped_storage().data_ptr()] = item.nbytes
                return item

            with torch.autograd.graph.saved_tensors_hooks(note, lambda item: item):
                loss = module(*inputs)[0]
            saved[compiled, keeps] = sum(seen.values())
            found[compiled, keeps] = torch.autograd.grad(loss, [*module.parameters()])
    # Of 8 samples 12 and 6 numbers of each of three blocks, in float64.
    assert saved[True, True] - saved[True, False] == 3 * 8 * (12 + 6) * 8
    for gradient in zip(*found.values(), strict=True):
        for other in gradient[1:]:
            torch.testing.assert_close(other, gradient[0], rtol=1e-9, atol=1e-12)


def whole(model, x, *, again=False, keeps=None):
    """The module of a model's training graph whose layers are to be compiled, that graph, and a batch.

    ``again``: they run again in the backward, or what ends with ops of that kind, but for ops of the kind ``keeps``.
    """
    captured = capture_model(
        model, (x,), targets=(torch.zeros(len(x)),), loss=lambda y, t: (y.sum(1) - t).square().mean()
    )
    layers = tuple((layer.start, layer.stop) for layer in captured.graph.layers)
    if isinstance(again, str):
        ends = [index + 1 for index, op in enumerate(captured.graph.ops) if op.kind == again]
        layers = tuple(pairwise([0, *ends]))
    kept = tuple(index for index, op in enumerate(captured.graph.ops) if op.kind == keeps)
    graph = replace(captured.graph, compiled=1, recompute=layers if again else (), keeps=kept)
    ops = range(len(graph.ops))
    made = part(captured, graph.inputs, graph.outputs, batch_size=len(x), ops=ops)
    return checkpoint_ranges(made, graph, ops), graph, (x, torch.zeros(len(x)))


def gradients(module, inputs):
    """The loss and the gradients of all parameters."""
    parameters = [*module.parameters()]
    loss = module(*inputs)[0]
    return loss, *torch.autograd.grad(loss, parameters)
