"""`optimize`: what comes back is equal to the model, in both modes, or is the model itself."""

import itertools
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from meshwright import optimize
from meshwright.capture import capture_model
from meshwright.rewrite.fx import read_captured, write_graph
from meshwright.rewrite.fx.aten_in import CONVERTERS
from meshwright.rewrite.fx.captured import Rewritten
from meshwright.rewrite.fx.check import check_equal
from meshwright.rewrite.fx.fold import fold_constants
from meshwright.rewrite.fx.reading import channels_last
from meshwright.rewrite.fx.saving import save_program
from meshwright.rewrite.optimize import rewrite_model
from meshwright.rewrite.rewrite_report import operator_rows, report_page, rule_rows, summary
from meshwright.rewrite.rulebook import BookRule, shipped_rule_book
from meshwright.rewrite.rules import rule_of
from meshwright.rewrite.search.call_costs import alternate
from meshwright.rewrite.search.ruleset import guide
from meshwright.rewrite.special import Special
from meshwright.rewrite.terms import Terms
from meshwright.spec import RewriteError

RULES = guide(shipped_rule_book("torch").rules)


def predicted(model, batch, **options):
    """The cheapest graph by prediction alone: no timing decides what is tested."""
    return rewrite_model(model, batch, rules=RULES, measure=False, least_gain=-1.0, **options)


class Net(nn.Module):
    """Convolution, batch norm and dropout; two products of one input; softmax by hand; a buffer that counts."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.Dropout(0.3)
        self.one, self.two = nn.Linear(6, 5), nn.Linear(6, 5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, scale=None):
        self.calls.add_(1)
        x = self.drop(torch.relu(self.norm(self.conv(x)))).mean((2, 3))
        x = torch.exp(self.one(x)) * torch.sigmoid(self.two(x))
        x = x / x.sum(-1, keepdim=True)
        return {"share": x if scale is None else x * scale, "tag": "net", "log": (x.log(), None)}


def net(training):
    torch.manual_seed(0)
    model = Net().train(training)
    nn.init.uniform_(model.norm.running_var, 0.5, 2.0)
    nn.init.normal_(model.norm.running_mean)
    return model


@pytest.mark.parametrize("training", [False, True])
def test_outputs_gradients_and_buffers_are_those_of_the_model(training):
    model, twin = net(training), net(training)
    found = predicted(model, torch.randn(4, 3, 8, 8))
    assert isinstance(found.module, Rewritten)
    assert found.chosen.worst < 1e-9
    for seed in range(3):
        x = torch.randn(4, 3, 8, 8)
        results = []
        for module in (found.module, twin):
            torch.manual_seed(seed)
            out = module(x)
            assert (out["tag"], out["log"][1]) == ("net", None)
            results.append((out["share"], out["log"][0]))
        for one, two in zip(*results, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
        if training:
            for made in results:
                (made[0] * made[1]).sum().backward()
            for (name, one), two in zip(model.named_parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert model.calls == twin.calls == 3
    torch.testing.assert_close(model.norm.running_mean, twin.norm.running_mean)


def test_weights_are_folded_for_inference_and_followed_in_training():
    x = torch.randn(4, 3, 8, 8)
    inference, training = predicted(net(False), x), predicted(net(True), x)
    assert any("folded" in name for name, _ in inference.module.named_buffers())
    assert "batch norm of a convolution" in inference.chosen.found.rules
    names = {name.removeprefix("graph_module.") for name, _ in training.module.named_parameters()}
    assert names == {name for name, _ in net(True).named_parameters()}


def test_the_result_is_called_like_the_model_and_says_what_it_was_made_for():
    model = net(False)
    x = torch.randn(4, 3, 8, 8)
    found = predicted(model, {"x": x, "scale": torch.tensor(2.0)})
    torch.testing.assert_close(
        found.module(x=x, scale=torch.tensor(2.0))["share"], model(x, torch.tensor(2.0))["share"]
    )
    with pytest.raises(RewriteError, match=r"takes 'x' of the shape \(4, 3, 8, 8\), but \(2, 3, 8, 8\) was given"):
        found.module(x=x[:2], scale=torch.tensor(2.0))
    with pytest.raises(RewriteError, match="Call it with arguments like the example batch"):
        found.module(x)


class Odd(nn.Module):
    """In-place writes, random numbers, a branch on data, an unknown operator."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(6, 6)

    def forward(self, x):
        y = self.line(x)
        y += 1
        y[:, 0] = 3.0
        y = y + torch.rand_like(y)
        y = torch.cond(y.sum() > 0, lambda z: z.sin(), lambda z: z.cos(), (y,))
        return torch.linalg.vector_norm(y * 0.5 * 2.0, dim=1), torch.cumsum(y.masked_fill(y > 2, 0.0), 1)


def test_what_is_unknown_is_carried_through():
    torch.manual_seed(0)
    model, x = Odd().eval(), torch.randn(3, 6)
    found = predicted(model, (x,))
    assert found.candidates
    for seed in range(2):
        with torch.no_grad():
            torch.manual_seed(seed)
            wanted = model(x)
            torch.manual_seed(seed)
            results = found.candidates[0].graph(x)
        for one, two in zip(results, wanted, strict=True):
            torch.testing.assert_close(one, two)


@pytest.mark.long
def test_what_is_not_faster_is_not_handed_over():
    class Plain(nn.Module):
        def forward(self, x):
            return torch.relu(x)

    model = Plain().eval()
    assert optimize(model, torch.randn(4, 4), rules=RULES, budget_s=0.2) is model


@pytest.mark.long
def test_what_is_much_faster_is():
    class Waste(nn.Module):
        def forward(self, q, k, v):
            return torch.matmul(torch.matmul(q, k.transpose(-1, -2)), v)

    torch.manual_seed(0)
    model, batch = Waste().eval(), tuple(torch.randn(512, 8) for _ in range(3))
    found = rewrite_model(model, batch, rules=RULES, budget_s=2.0)
    assert found.module is not model
    assert found.chosen.speedup > 1.5
    torch.testing.assert_close(found.module(*batch), model(*batch), rtol=1e-4, atol=1e-4)
    # Of all rules several lead to graphs that take as long, so that none of them gains anything; one alone does.
    name = "products of three in the other order"
    alone = guide(each for each in shipped_rule_book("torch").rules if each.rule.name == name)
    found = rewrite_model(model, batch, rules=alone, measure=False, budget_s=2.0)
    assert found.chosen.gains[name] > 0


def test_a_false_graph_does_not_pass_the_last_net():
    class Two(nn.Module):
        def forward(self, x, y):
            return torch.matmul(x, y)

    batch = (torch.randn(4, 4), torch.randn(4, 4))
    source = read_captured(capture_model(Two().eval(), batch, mode="inference", verify=False), batch)
    turned = Terms()
    place = {}
    for term in source.terms.needed():
        node = source.terms.nodes[term]
        operands = tuple(place[operand] for operand in reversed(node.operands))
        place[term] = turned.add(node._replace(operands=operands), source.terms.types[term])
    turned.outputs = tuple(place[output] for output in source.terms.outputs)
    right, wrong = write_graph(source.terms, source), write_graph(turned, source)
    assert check_equal(right, right, batch, training=True) == 0
    with pytest.raises(RewriteError, match="output 0 differs by"):
        check_equal(right, wrong, batch, training=False)


class Remembering(nn.Module):
    """It counts, normalises, keeps what it saw, and writes into its batch."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop, self.seen = nn.BatchNorm1d(4), nn.Dropout(0.5), None
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        x.mul_(2)
        return self.drop(self.norm(x)).exp() * torch.exp(x)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.matrix
def test_the_model_the_batch_and_random_numbers_stay_as_they_were(training):
    model, x = Remembering().train(training), torch.randn(8, 4)
    batch, state = x.clone(), {name: value.clone() for name, value in model.state_dict().items()}
    attributes, random = dict(model.__dict__), torch.get_rng_state()
    rewrite_model(model, x, rules=RULES, budget_s=0.5)
    assert torch.equal(x, batch)
    assert torch.equal(torch.get_rng_state(), random)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=0, atol=0)
    assert model.__dict__.keys() == attributes.keys()
    assert model.training == training


def test_a_graph_that_is_not_equal_is_dropped_and_said():
    false = BookRule(rule=rule_of("lost relu", "relu(x)", "x"), ranks=(), special=Special())
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.randn(8, 4)
    found = rewrite_model(model, x, rules=guide([false]), measure=False, least_gain=-1.0)
    assert found.module is model
    assert "lost relu" not in str(found.chosen)
    assert "differs by" in found.refused[0]
    assert "not equal to the model on this batch" in summary(found)


def test_what_was_read_wrongly_does_not_pass_either(monkeypatch):
    # The converter of exp makes a sine of it: both written graphs agree, and the model does not.
    monkeypatch.setitem(CONVERTERS, "aten.exp.default", lambda r, a: r.terms.apply("sin", a["self"]))
    found = rewrite_model(Square().eval(), torch.randn(3, 3), rules=RULES, measure=False, least_gain=-1.0)
    assert found.chosen is None
    assert found.refused


class Square(nn.Module):
    def forward(self, x):
        return torch.exp(x.neg().neg()) * 2


def test_the_mode_is_part_of_what_it_was_made_for():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()
    made = predicted(model, torch.randn(8, 4)).module
    made.eval()
    with pytest.raises(RewriteError, match="in evaluation mode, but was made for training"):
        made(torch.randn(8, 4))


def test_all_outputs_may_be_constant():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self, x):
            return self.w * 2

    model = Constant().eval()
    torch.testing.assert_close(predicted(model, torch.randn(2, 3)).module(torch.randn(2, 3)), model.w * 2)


def test_gradients_are_those_of_torch_where_values_are_equal():
    class Ties(nn.Module):
        def forward(self, x):
            top = torch.maximum(x, torch.zeros_like(x))
            return top + (x.view(torch.int32).view(torch.float32) + x) * x.amax(1).amax(0)

    x, twin = (torch.tensor([[1.0, 1.0], [0.0, 1.0]], requires_grad=True) for _ in range(2))
    made = predicted(Ties().train(), torch.randn(2, 2)).module
    made(x).sum().backward()
    Ties()(twin).sum().backward()
    torch.testing.assert_close(x.grad, twin.grad)


def test_images_without_a_batch():
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3)).eval(), torch.randn(3, 16, 16)
    torch.testing.assert_close(optimize(model, x, budget_s=0.5)(x), model(x), rtol=1e-5, atol=1e-5)


def test_a_batch_that_is_written_to_after_it_was_read():
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self, x):
            y = x.sin()
            x.add_(1)
            return y * self.w

    x = torch.randn(2, 3)
    made = predicted(Written().train(), x.clone()).module
    assert made(x.clone()).requires_grad


def test_constants_that_share_memory_are_folded():
    # Two parts of one folded product, and one output.
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6, 6))

        def forward(self, x):
            product = self.a @ self.b
            return torch.relu(x * product[:2]) + x * product[2:]

    model, x = Parts().eval(), torch.randn(2, 6)
    source = read_captured(capture_model(model, x, mode="inference", verify=False, needs_loss=False), x)
    terms, effects, held = fold_constants(source.terms, source, source.effects, frozen=True)
    torch.testing.assert_close(write_graph(terms, source, effects=effects, held=held)(x)[0], model(x))
    assert len({tensor.untyped_storage().data_ptr() for tensor in held.values()}) == len(held) == 2


class Images(nn.Module):
    """Convolutions around a call that nobody declared, which looks at memory; two outputs, one of them an image."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1, bias=False)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        x = torch.relu(self.norm(self.one(x)))
        y = self.two(torch.special.entr(x))
        return x, torch.as_strided(y, (2, 8), (y.stride(0), y.stride(1))) + F.max_pool2d(y, 2).flatten(2).sum(-1)


def test_convolutions_in_channels_last_give_the_same():
    torch.manual_seed(0)
    model, x = Images().eval(), torch.randn(2, 3, 8, 8)
    source = read_captured(capture_model(model, x, mode="inference", verify=False, needs_loss=False), x)
    graph = write_graph(source.terms, source, effects=source.effects)
    moved = channels_last(graph)
    for value, other in zip(moved(x), model(x), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-5)
        assert value.stride() == other.stride()
    layouts = [weight.is_contiguous(memory_format=torch.channels_last) for weight in moved.state_dict().values()]
    assert any(layouts)
    # The model's own weights stay as they lie.
    assert model.one.weight.is_contiguous()
    assert graph(x)[0].is_contiguous()
    assert channels_last(write_graph_of(nn.Linear(3, 3), torch.randn(2, 3))) is None


def write_graph_of(model, x):
    source = read_captured(capture_model(model.eval(), x, mode="inference", verify=False, needs_loss=False), x)
    return write_graph(source.terms, source, effects=source.effects)


@pytest.mark.long
def test_layouts_are_candidates_for_inference_only():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    names = [each.name for each in rewrite_model(model.eval(), x, rules=RULES, budget_s=2.0).candidates]
    assert any(name.endswith("channels last") for name in names)
    names = [each.name for each in rewrite_model(model.train(), x, rules=RULES, budget_s=2.0).candidates]
    assert not any(name.endswith("channels last") for name in names)


def test_arms_alternate_and_short_ones_run_more_often():
    runs = []
    taken = alternate([lambda: runs.append("a"), lambda: runs.append("b")], rounds=6, budget_s=0.0)
    assert taken.shape[1] == 2
    assert len(taken) >= 5
    # One after the other before anything counts, then in the other order every other round: neither always follows.
    assert "".join(name for name, _ in itertools.groupby(runs)) == "abababa"
    assert len(runs) > 20


def test_it_composes_with_compile_and_export(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval(), torch.randn(2, 3, 8, 8)
    module = predicted(model, x).module
    wanted = model(x)
    compiled = torch.compile(module, backend="eager")
    torch.testing.assert_close(compiled(x), wanted, rtol=1e-5, atol=1e-6)
    place = tmp_path / "net.pt2"
    torch.export.save(torch.export.export(module, (x,), strict=False), place)
    torch.testing.assert_close(torch.export.load(place).module()(x), wanted, rtol=1e-5, atol=1e-6)


class Named(NamedTuple):
    first: torch.Tensor
    rest: dict


class OutputOfOthers(OrderedDict):
    pass


pytree.register_pytree_node(
    OutputOfOthers,
    lambda held: (list(held.values()), list(held)),
    lambda values, names: OutputOfOthers(zip(names, values, strict=True)),
    serialized_type_name="tests.OutputOfOthers",
)


def test_programs_return_containers_that_torch_knows(tmp_path):
    class Model(nn.Module):
        def forward(self, x):
            return OutputOfOthers(logits=x.exp(), more=Named(x.sin(), {"a": [x, x.cos()]}))

    x = torch.randn(2, 3)
    save_program(Model().eval(), (x,), tmp_path / "plain.pt2")
    program = torch.export.load(tmp_path / "plain.pt2")
    found = program.module()(x)
    assert type(found) is dict
    assert type(found["more"]) is tuple
    torch.testing.assert_close(found["more"][1]["a"][1], x.cos())
    assert "OutputOfOthers" not in str(program.call_spec)


def test_the_report_shows_both_graphs_and_each_rule_with_its_proof():
    found = predicted(net(False), torch.randn(4, 3, 8, 8))
    rows = {row["rule"]: row for row in rule_rows(found.chosen, found.rules)}
    assert rows["batch norm of a convolution"]["proof"].startswith("for all sizes of x, w, m, v, k, b with 4, 4,")
    page = report_page("net <1>", found)
    assert "net &lt;1&gt;" in page
    assert page.count("<h3>") == 2
    assert str(len(operator_rows(found.source.terms))) in page
    assert "predicted" in summary(found)


def test_a_size_that_the_model_returns_is_that_of_the_batch():
    class Sizes(nn.Module):
        def forward(self, x):
            return F.relu(x), x.shape[0]

    model = Sizes().eval()
    found = rewrite_model(model, torch.randn(2, 3), rules=RULES, measure=False)
    out = found.module(torch.randn(2, 3))
    assert out[1] == 2
