"""What would be silently wrong is refused, with the place named, and the user's model is left as it was."""

import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.capture import capture_model, flatten_batch, part
from meshwright.spec import CaptureError, GraphError

from .models import Baked, Gpt, TwoOutputs, build, labels, mean_square, numbers, token_loss, tokens, two_losses


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


class Inner(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.act = act
        self.seen = 0
        self.log = []
        self.scratch = torch.zeros(3, 4, dtype=torch.float64)

    def forward(self, x):
        return self.act(self, self.linear(x))


class Outer(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(4, 4), Inner(act)])

    def forward(self, x):
        for layer in self.body:
            x = layer(x)
        return x


def custom_function(module, x):
    return Double.apply(x)


def tensor_hook(module, x):
    x.register_hook(lambda gradient: gradient * 2)
    return x


def counts(module, x):
    module.seen += 1
    return x * module.seen


def appends(module, x):
    module.log.append(1)
    return x * len(module.log)


def remembers(module, x):
    module.last = x
    return x


def branches_on_data(module, x):
    return x if x.sum() > 0 else -x


def reads_a_number(module, x):
    return x[: int(x.abs().sum().item())]


def filters(module, x):
    return x[x > 0].sum().reshape(1)


def reads_data(module, x):
    return x * x.data


def reads_data_of_a_weight(module, x):
    return x + module.linear.weight.data.clamp(0, 1).sum()


def autocast(module, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return module.linear(x.float()).double()


def writes_an_attribute(module, x):
    module.scratch.add_(x.detach())
    return x + module.scratch


def writes_a_parameter(module, x):
    with torch.no_grad():
        module.linear.weight.mul_(0.5)
    return x


def recomputes(module, x):
    return checkpoint(module.linear, x, use_reentrant=True)


def loops_on_data(module, x):
    return torch.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v * 2), (torch.tensor(0), x))[1]


def fails(module, x):
    raise ValueError("the user's own mistake")


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (custom_function, ["'Double'", "test_refusals.py:", "body.1", "custom_op"]),
        (tensor_hook, ["register_hook", "test_refusals.py:", "body.1"]),
        (counts, ["'seen'", "'body.1'", "register_buffer"]),
        (appends, ["'log'", "'body.1'"]),
        (remembers, ["'last'", "'body.1'"]),
        (branches_on_data, ["test_refusals.py:", "data", "torch.cond"]),
        (reads_a_number, ["test_refusals.py:", "data"]),
        (filters, ["test_refusals.py:", "data"]),
        (reads_data, ["test_refusals.py:", "Tensor.data", "detach()", "body.1"]),
        (reads_data_of_a_weight, ["test_refusals.py:", "Tensor.data", "detach()"]),
        (autocast, ["test_refusals.py:", "autocast"]),
        (writes_an_attribute, ["test_refusals.py:", "neither parameter nor buffer"]),
        (writes_a_parameter, ["test_refusals.py:", "'body.1.linear.weight'"]),
        (recomputes, ["test_refusals.py:", "use_reentrant=False"]),
        (loops_on_data, ["test_refusals.py:", "while_loop"]),
        (fails, ["test_refusals.py:", "the user's own mistake"]),
    ],
)
def test_refused_with_the_place_named(act, words):
    model = Outer(act).double()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    log = list(model.body[1].log)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CaptureError) as caught:
        capture_model(model, numbers(3, 4), targets=numbers(3, 4, 1), loss=mean_square)
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert "\n" not in text
    assert len(text) < 900
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys()
        assert all(vars(module)[key] is value for key, value in before[name].items() if not key.startswith("_"))
    assert model.body[1].log == log
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


class Lazy(nn.Module):
    """Makes a table when it is first needed; ``first`` is the factor of the call that makes it."""

    def __init__(self, first=1.0):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.table, self.first = None, first

    def forward(self, x):
        factor = 1.0
        if self.table is None:
            self.table, factor = torch.arange(4.0, dtype=x.dtype), self.first
        return self.norm(self.linear(x)) * self.table * factor


def test_what_the_first_forward_sets_and_the_next_ones_leave_is_captured():
    # The batch norm tells that the forward that sets it counts for nothing.
    model = Lazy().double()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    captured = capture_model(model, numbers(3, 4), targets=numbers(3, 4, 1), loss=mean_square)
    assert captured.remark == ""
    assert model.table is None
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    graph = captured.graph
    (loss,) = part(captured, graph.inputs, graph.outputs, batch_size=3)(numbers(3, 4), numbers(3, 4, 1))
    assert torch.equal(loss, mean_square(Lazy.forward(model, numbers(3, 4)), numbers(3, 4, 1)))
    with pytest.raises(CaptureError, match="step 1, the output 0 differs"):
        capture_model(Lazy(first=2.0).double(), numbers(3, 4), targets=numbers(3, 4, 1), loss=mean_square)


def remembers_the_batch(module, x):
    module.last = x.mean(0) if module.last is None else module.last
    return x - module.last


def remembers_a_weight(module, x):
    module.last = module.linear.weight.exp() if module.last is None else module.last
    return x @ module.last


@pytest.mark.parametrize("act", [remembers_the_batch, remembers_a_weight])
@pytest.mark.parametrize("verify", [True, False])
def test_what_the_first_forward_sets_may_not_come_from_data(act, verify):
    model = Outer(act).double()
    model.body[1].last = None
    with pytest.raises(CaptureError, match=r"changes the Python attribute 'last' of module 'body\.1'"):
        capture_model(model, numbers(2, 4), targets=numbers(2, 4, 1), loss=mean_square, verify=verify)
    assert model.body[1].last is None


def test_blocks_that_set_tables_are_traced_once_each(monkeypatch):
    export, exported = torch.export.export, []
    monkeypatch.setattr(torch.export, "export", lambda *args, **options: exported.append(1) or export(*args, **options))
    blocks = nn.Sequential(*(Lazy() for _ in range(6))).double()
    graph = capture_model(blocks, numbers(3, 4), targets=numbers(3, 4, 1), loss=mean_square).graph
    assert len(exported) == 2
    assert sum(op.kind.startswith("aten.linear") for op in graph.ops) == 6
    assert [block.table for block in blocks] == [None] * 6


class Losses(nn.Module):
    """Outputs with a loss among them, as models of transformers give."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        found = self.linear(x)
        return {"loss": found.square().mean(), "logits": found}


def test_of_outputs_with_a_loss_training_takes_the_loss():
    model = Losses().double()
    assert len(capture_model(model, numbers(3, 4)).graph.outputs) == 1
    assert len(capture_model(model, numbers(3, 4), needs_loss=False).graph.outputs) == 2
    assert len(capture_model(model, numbers(3, 4), mode="inference").graph.outputs) == 2


def test_checkpoints_inside_a_model_are_left_out_with_a_remark():
    def recomputes_once(module, x):
        return checkpoint(module.linear, x, use_reentrant=False)

    plain, remarked = (
        capture_model(Outer(act).double(), numbers(3, 4), targets=numbers(3, 4, 1), loss=mean_square, name="m")
        for act in (lambda module, x: module.linear(x), recomputes_once)
    )
    assert plain.remark == ""
    assert remarked.graph.content_hash == plain.graph.content_hash
    assert re.match(r".*test_refusals\.py:\d+: .*'body\.1' .*torch\.utils\.checkpoint", remarked.remark)
    assert "--recompute full" in remarked.remark
    assert capture_model(Outer(recomputes_once).double(), numbers(3, 4), mode="inference").remark == ""


def test_autograd_functions_work_after_a_refusal():
    with pytest.raises(CaptureError):
        capture_model(Outer(custom_function).double(), numbers(3, 4), targets=numbers(3, 4), loss=mean_square)
    x = torch.ones(2, requires_grad=True)
    Double.apply(x).sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]


def test_module_backward_hooks_are_refused_and_parameter_hooks_kept():
    model = Outer(lambda module, x: x).double()
    handle = model.body[1].register_full_backward_hook(lambda module, inputs, outputs: None)
    with pytest.raises(CaptureError, match=r"'body\.1' \(Inner\) has backward hooks"):
        capture_model(model, numbers(3, 4), targets=numbers(3, 4), loss=mean_square)
    handle.remove()
    model.body[0].weight.register_hook(lambda gradient: gradient * 5)
    captured = capture_model(model, numbers(3, 4), targets=numbers(3, 4, 1), loss=mean_square)
    graph = captured.graph
    (loss,) = part(captured, graph.inputs, graph.outputs, batch_size=3)(numbers(3, 4), numbers(3, 4, 1))
    loss.backward()
    found = model.body[0].weight.grad.clone()
    model.zero_grad()
    mean_square(model(numbers(3, 4)), numbers(3, 4, 1)).backward()
    assert torch.equal(found, model.body[0].weight.grad)


FACTOR = [1.0]


class Global(nn.Module):
    """Depends on a global that changes with every call."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        FACTOR[0] += 1.0
        return self.linear(x) * FACTOR[0]


def test_the_check_catches_what_no_rule_knows():
    with pytest.raises(CaptureError, match="step 1, the output 0 differs"):
        capture_model(Global().double(), numbers(3, 4), targets=numbers(3, 4, 1), loss=mean_square)


def test_the_check_leaves_no_trace():
    model, batch, loss = build("two_outputs")
    dropout = nn.Dropout(0.5)
    model.extra = dropout
    model.bn.eval()
    model.main.weight.grad = torch.ones_like(model.main.weight)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    objects = {name: id(value) for name, value in (*model.named_buffers(), *model.named_parameters())}
    flags = [module.training for module in model.modules()]
    torch.manual_seed(3)
    random_state = torch.get_rng_state()
    inputs, targets = batch(3)
    capture_model(model, inputs, targets=targets, loss=loss)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [module.training for module in model.modules()] == flags
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert {name: id(value) for name, value in (*model.named_buffers(), *model.named_parameters())} == objects
    assert torch.equal(model.main.weight.grad, torch.ones_like(model.main.weight))
    assert all(p.grad is None for name, p in model.named_parameters() if name != "main.weight")


def test_a_baked_batch_is_captured_anew_per_size():
    torch.manual_seed(0)
    graphs = []
    for size in (2, 3):
        model = Baked(size).double()
        captured = capture_model(model, numbers(size, 4), targets=numbers(size, 4, 1), loss=mean_square)
        assert captured.graph.batch_size == size
        graph = captured.graph
        batch = (numbers(size, 4, 7), numbers(size, 4, 8))
        (loss,) = part(captured, graph.inputs, graph.outputs, batch_size=size)(*flatten_batch(captured, *batch))
        assert loss.item() == mean_square(model(batch[0]), batch[1]).item()
        with pytest.raises(GraphError, match=f"batches of {size} samples only"):
            part(captured, graph.inputs, graph.outputs, batch_size=size + 1)
        graphs.append(graph)
    assert graphs[0].content_hash != graphs[1].content_hash


@pytest.mark.long
def test_an_example_of_one_sample_leaves_the_batch_open():
    model = Gpt().double()
    one = capture_model(model, tokens(1), targets=tokens(1), loss=token_loss)
    four = capture_model(model, tokens(4), targets=tokens(4), loss=token_loss, verify=False)
    assert one.graph.batch_size is None
    assert one.graph.content_hash == four.graph.content_hash


@pytest.mark.long
def test_one_tensor_as_input_and_target_is_two_inputs():
    model, same, other = Gpt().double(), tokens(2), tokens(2, 1)
    one = capture_model(model, same, targets=same, loss=token_loss)
    two = capture_model(model, same, targets=other, loss=token_loss, verify=False)
    assert one.graph.content_hash == two.graph.content_hash


def test_inference_has_outputs_and_no_loss():
    model = TwoOutputs().double()
    batch = {"x": numbers(3, 6), "scale": numbers(3, 6, 1)}
    captured = capture_model(model, batch, mode="inference")
    graph = captured.graph
    assert not graph.has_loss
    assert len(graph.outputs) == 2
    assert not any(op.saved or op.backward_flops.per_sample for op in graph.ops)
    assert model.training
    found = part(captured, graph.inputs, graph.outputs, batch_size=3)(*flatten_batch(captured, batch))
    expected = model.eval()(**batch)
    assert torch.equal(found[0], expected["main"])
    assert torch.equal(found[1], expected["side"])


def test_a_model_that_returns_its_loss_needs_no_other():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x, y):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return (x - y).square().mean()

    graph = capture_model(WithLoss().double(), (numbers(3, 4), numbers(3, 4, 1))).graph
    assert graph.has_loss
    assert [graph.tensors[i].name for i in graph.inputs] == ["x", "y"]


def test_training_without_a_loss_is_refused():
    with pytest.raises(CaptureError, match="no loss was given"):
        capture_model(nn.Linear(4, 4), torch.zeros(2, 4))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("act", [reads_data, reads_data_of_a_weight])
def test_data_is_refused_in_either_mode_and_without_weights(act, device):
    model = Outer(act).to(device)
    for mode in ("training", "inference"):
        with pytest.raises(CaptureError, match=r"test_refusals\.py:\d+: .*Tensor\.data"):
            capture_model(model, torch.zeros(3, 4, device=device), loss=torch.mean, mode=mode)
    one = torch.ones(2)
    one.data = torch.zeros(3)
    assert one.data.tolist() == [0.0] * 3
    assert "data" not in vars(torch.Tensor)


def test_the_shape_of_data_is_no_reason_to_refuse():
    model = Outer(lambda module, x: x * x.data.shape[1])
    assert capture_model(model, torch.ones(3, 4), loss=torch.mean).graph.has_loss


class Looked(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(self.embedding(x)).mean()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused(kind):
    indices = torch.zeros(3, 2, dtype=torch.long)
    with pytest.raises(CaptureError, match=r"test_refusals\.py:\d+: .*sparse=True.*Pass sparse=False"):
        capture_model(Looked(kind(10, 4, sparse=True)), indices)
    # Without a gradient there is no sparse one.
    frozen = Looked(kind(10, 4, sparse=True))
    frozen.embedding.requires_grad_(False)
    for model in (frozen, Looked(kind(10, 4))):
        assert capture_model(model, indices, verify=False).graph.has_loss
    capture_model(Looked(kind(10, 4, sparse=True)), indices, mode="inference")


def test_a_model_with_nothing_to_train_is_refused_in_training_only():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).requires_grad_(False)
    with pytest.raises(CaptureError, match=r"no parameter requires a gradient.*requires_grad_\(True\).*--inference"):
        capture_model(model, torch.zeros(3, 4), loss=torch.mean)
    assert not capture_model(model, torch.zeros(3, 4), mode="inference").graph.has_loss
    model[1].requires_grad_(True)
    assert capture_model(model, torch.zeros(3, 4), loss=torch.mean).graph.num_parameters(trainable_only=True) == 5


def test_batches_that_are_built_differently_are_refused():
    model, batch, loss = build("two_outputs")
    inputs, targets = batch(3)
    captured = capture_model(model, inputs, targets=targets, loss=loss, verify=False)
    with pytest.raises(CaptureError, match="was captured with"):
        flatten_batch(captured, numbers(3, 6), labels(3, 3))
    with pytest.raises(CaptureError, match="cannot be called"):
        capture_model(model, {"x": numbers(3, 6)}, targets=targets, loss=two_losses)


def test_a_part_that_lacks_a_value_says_which():
    model, batch, loss = build("gpt")
    inputs, targets = batch(3)
    captured = capture_model(model, inputs, targets=targets, loss=loss, verify=False)
    graph = captured.graph
    second = graph.layers[2]
    with pytest.raises(GraphError, match="neither among its feeds nor computed"):
        part(captured, (), (graph.ops[second.stop - 1].outputs[0],), batch_size=2, ops=range(second.start, second.stop))


def test_a_part_holds_the_users_own_objects_and_nothing_else():
    model, batch, loss = build("two_outputs")
    inputs, targets = batch(3)
    captured = capture_model(model, inputs, targets=targets, loss=loss, verify=False)
    graph = captured.graph
    layer = next(item for item in graph.layers if item.name == "blocks.1")
    ops = graph.ops[layer.start : layer.stop]
    made = {i for op in ops for i in op.outputs}
    feeds = sorted({i for op in ops for i in op.inputs if graph.tensors[i].role == "activation"} - made)
    module = part(captured, feeds, (ops[-1].outputs[0],), batch_size=3)
    held = dict(module.named_parameters())
    assert sorted(held) == ["blocks.1.bias", "blocks.1.weight"]
    assert all(held[name] is model.get_parameter(name) for name in held)
    whole = part(captured, graph.inputs, graph.outputs, batch_size=3, ops=range(len(graph.ops)))
    assert {name: id(b) for name, b in whole.named_buffers()} == {name: id(b) for name, b in model.named_buffers()}
    assert set(whole.state_dict()) == set(model.state_dict())


@pytest.mark.long
def test_weights_that_were_never_allocated():
    with torch.device("meta"):
        model = Gpt(layers=6)
    ids = torch.zeros(2, 8, dtype=torch.long, device="meta")
    graph = capture_model(model, ids, targets=ids, loss=token_loss).graph
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    real = capture_model(Gpt(layers=6), tokens(2), targets=tokens(2), loss=token_loss, verify=False).graph
    assert graph.content_hash == real.content_hash
