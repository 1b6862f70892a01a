"""The models compute what their papers say (written out again here, with explicit sums), train, and can be exported."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.export import Dim, export

from meshwright.zoo import GPT, Llama, load_model, load_shape

from .sources import losses_of_steps

TINY = ["gpt-tiny", "llama-tiny", "resnet-tiny", "unet-tiny", "vgg-tiny"]
every_family = pytest.mark.parametrize("name", TINY)


def small(name):
    """A tiny source in float64."""
    sizes = {"sequence_length": 12} if name in ("gpt-tiny", "llama-tiny") else {"image_size": 16}
    source = load_model(name, batch_size=3, **sizes)
    model = source.model.double()
    inputs = tuple(t.double() if t.is_floating_point() else t for t in source.inputs)
    return replace(source, model=model, inputs=inputs)


def attend(query, key, value):
    """Causal attention of one head, token by token; each (sequence, width)."""
    rows = []
    for t in range(len(query)):
        scores = torch.stack([query[t] @ key[s] for s in range(t + 1)]) / math.sqrt(query.shape[1])
        weights = scores.exp() / scores.exp().sum()
        rows.append(sum(weight * value[s] for s, weight in enumerate(weights)))
    return torch.stack(rows)


def layer_norm(x, weight, bias):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


def gpt_by_hand(state, tokens, num_layers, num_heads):
    """GPT-2 for one sequence, from its weights."""
    x = torch.stack([state["embedding.weight"][token] + state["position.weight"][t] for t, token in enumerate(tokens)])
    for layer in range(num_layers):
        w = {name.removeprefix(f"blocks.{layer}."): item for name, item in state.items() if f"blocks.{layer}." in name}
        y = layer_norm(x, w["attention_norm.weight"], w["attention_norm.bias"])
        query, key, value = (
            y @ w["attention.query_key_value.weight"].T + w["attention.query_key_value.bias"]
        ).tensor_split(3, dim=-1)
        heads = zip(*(part.tensor_split(num_heads, dim=-1) for part in (query, key, value)), strict=True)
        mixed = torch.cat([attend(*head) for head in heads], dim=-1)
        x = x + mixed @ w["attention.projection.weight"].T + w["attention.projection.bias"]
        y = layer_norm(x, w["mlp_norm.weight"], w["mlp_norm.bias"])
        y = y @ w["mlp.widen.weight"].T + w["mlp.widen.bias"]
        y = y / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + y @ w["mlp.projection.weight"].T + w["mlp.projection.bias"]
    return layer_norm(x, state["norm.weight"], state["norm.bias"]) @ state["embedding.weight"].T


def test_gpt_is_gpt2():
    source = small("gpt-tiny")
    shape = load_shape("gpt-tiny")
    state = source.model.state_dict()
    tokens = source.inputs[0]
    expected = torch.stack([gpt_by_hand(state, row.tolist(), shape.num_layers, shape.num_heads) for row in tokens])
    torch.testing.assert_close(source.model(tokens), expected, rtol=1e-9, atol=1e-11)


def rms_norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turn(x, base):
    """Rotary positions by complex numbers: x (sequence, width)."""
    half = x.shape[1] // 2
    rates = torch.tensor([base ** (-2 * i / x.shape[1]) for i in range(half)])
    angles = torch.outer(torch.arange(len(x), dtype=torch.float64), rates.double())
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=1)


def llama_by_hand(state, tokens, shape):
    """Llama for one sequence, from its weights."""
    x = state["embedding.weight"][tokens]
    for layer in range(shape.num_layers):
        w = {name.removeprefix(f"blocks.{layer}."): item for name, item in state.items() if f"blocks.{layer}." in name}
        y = rms_norm(x, w["attention_norm.weight"])
        query = (y @ w["attention.query.weight"].T).tensor_split(shape.num_heads, dim=-1)
        key = (y @ w["attention.key.weight"].T).tensor_split(shape.num_key_value_heads, dim=-1)
        value = (y @ w["attention.value.weight"].T).tensor_split(shape.num_key_value_heads, dim=-1)
        group = shape.num_heads // shape.num_key_value_heads
        mixed = [
            attend(turn(q, shape.rope_base), turn(key[i // group], shape.rope_base), value[i // group])
            for i, q in enumerate(query)
        ]
        x = x + torch.cat(mixed, dim=-1) @ w["attention.projection.weight"].T
        y = rms_norm(x, w["mlp_norm.weight"])
        gate, up = y @ w["mlp.gate.weight"].T, y @ w["mlp.up.weight"].T
        x = x + (gate / (1 + (-gate).exp()) * up) @ w["mlp.down.weight"].T
    return rms_norm(x, state["norm.weight"]) @ state["head.weight"].T


def test_llama_is_llama():
    source = small("llama-tiny")
    shape = load_shape("llama-tiny")
    state = source.model.state_dict()
    tokens = source.inputs[0]
    expected = torch.stack([llama_by_hand(state, row, shape) for row in tokens])
    # The model keeps its table of angles in float32.
    torch.testing.assert_close(source.model(tokens), expected, rtol=1e-5, atol=1e-6)


def test_the_future_does_not_matter():
    for name in ("gpt-tiny", "llama-tiny"):
        source = small(name)
        tokens = source.inputs[0]
        changed = tokens.clone()
        changed[:, 7:] = (changed[:, 7:] + 1) % 256
        before, after = source.model(tokens), source.model(changed)
        torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-12)
        assert (before[:, 7:] - after[:, 7:]).abs().amin() > 0


def batch_norm(x, weight, bias):
    centred = x - x.mean((0, 2, 3), keepdim=True)
    scale = weight[:, None, None] / (centred.square().mean((0, 2, 3), keepdim=True) + 1e-5).sqrt()
    return centred * scale + bias[:, None, None]


def convolve(x, weight, bias=None, stride=1):
    """A padded convolution as one matrix product over unfolded patches."""
    size = weight.shape[-1]
    patches = F.unfold(x, size, padding=size // 2, stride=stride)
    height = (x.shape[2] + 2 * (size // 2) - size) // stride + 1
    y = (weight.flatten(1) @ patches).unflatten(-1, (height, -1))
    return y if bias is None else y + bias[:, None, None]


def residual_by_hand(state, prefix, x, stride, sizes):
    w = {name.removeprefix(prefix): item for name, item in state.items() if name.startswith(prefix)}
    y = x
    for i in range(1, len(sizes) + 1):
        y = convolve(y, w[f"convolution{i}.weight"], stride=stride if i == sizes.index(3) + 1 else 1)
        y = batch_norm(y, w[f"norm{i}.weight"], w[f"norm{i}.bias"])
        y = y.clamp(min=0) if i < len(sizes) else y
    if "shortcut.0.weight" in w:
        x = batch_norm(convolve(x, w["shortcut.0.weight"], stride=stride), w["shortcut.1.weight"], w["shortcut.1.bias"])
    return (x + y).clamp(min=0)


@pytest.mark.parametrize(("block", "sizes"), [("basic", [3, 3]), ("bottleneck", [1, 3, 1])])
def test_resnet_is_resnet(block, sizes):
    shape = replace(load_shape("resnet-tiny"), block=block, width=4, batch_size=3, image_size=16)
    torch.manual_seed(0)
    model = shape.build().double()
    (images,), _ = shape.batch()
    images = images.double()
    state = model.state_dict()
    x = convolve(images, state["stem.convolution.weight"])
    x = batch_norm(x, state["stem.norm.weight"], state["stem.norm.bias"]).clamp(min=0)
    for index in range(sum(shape.blocks_per_stage)):
        x = residual_by_hand(state, f"blocks.{index}.", x, 2 if index in (2, 4) else 1, sizes)
    expected = x.mean((2, 3)) @ state["head.weight"].T + state["head.bias"]
    torch.testing.assert_close(model(images), expected, rtol=1e-9, atol=1e-11)


def pool(x):
    return x.unfold(2, 2, 2).unfold(3, 2, 2).amax((-2, -1))


def test_vgg_is_vgg():
    source = small("vgg-tiny")
    model = source.model.eval()  # dropout apart
    state = model.state_dict()
    x = source.inputs[0]
    for index, module in enumerate(model.features):
        if f"features.{index}.weight" in state:
            x = convolve(x, state[f"features.{index}.weight"], state[f"features.{index}.bias"]).clamp(min=0)
        elif isinstance(module, torch.nn.MaxPool2d):
            x = pool(x)
    x = x.flatten(1)  # 16 pixels, halved three times, are the grid of 2
    for index in (0, 3, 6):
        x = x @ state[f"classifier.{index}.weight"].T + state[f"classifier.{index}.bias"]
        x = x.clamp(min=0) if index < 6 else x
    torch.testing.assert_close(model(source.inputs[0]), x, rtol=1e-9, atol=1e-11)


def test_unet_is_unet():
    source = small("unet-tiny")
    state = source.model.state_dict()

    def double(prefix, x):
        for i in (1, 2):
            x = convolve(x, state[f"{prefix}convolution{i}.weight"], state[f"{prefix}convolution{i}.bias"]).clamp(min=0)
        return x

    def up(prefix, x):
        """Each pixel becomes a 2×2 patch."""
        weight, bias = state[f"{prefix}up.weight"], state[f"{prefix}up.bias"]
        y = torch.einsum("bchw,codf->bohdwf", x, weight)
        return y.flatten(4, 5).flatten(2, 3) + bias[:, None, None]

    x, skips = source.inputs[0], []
    for level in range(3):
        skips.append(double(f"encoder.{level}.", x))
        x = pool(skips[-1])
    x = double("bottom.", x)
    for level in range(3):
        x = double(f"decoder.{level}.convolutions.", torch.cat((skips.pop(), up(f"decoder.{level}.", x)), dim=1))
    expected = convolve(x, state["head.weight"], state["head.bias"])
    torch.testing.assert_close(source.model(source.inputs[0]), expected, rtol=1e-9, atol=1e-11)


# --- losses and training ---


@every_family
def test_the_loss_is_the_mean_cross_entropy(name):
    source = small(name)
    source.model.eval()
    logits, (targets,) = source.model(*source.inputs), source.targets
    rows = logits.flatten(0, 1) if logits.ndim == 3 else logits.movedim(1, -1).flatten(0, -2)
    chosen = rows[torch.arange(len(rows)), targets.flatten()]
    torch.testing.assert_close(source.compute_loss(), (rows.exp().sum(1).log() - chosen).mean())


@every_family
def test_every_parameter_gets_a_gradient(name):
    source = small(name)
    source.compute_loss().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in source.model.parameters() if p.numel() > 1)


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_a_fresh_language_model_knows_nothing(name):
    assert load_model(name).compute_loss().item() == pytest.approx(math.log(256), rel=0.02)


@every_family
def test_a_few_steps_on_one_batch_lower_the_loss(name):
    source = small(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        losses = losses_of_steps(source, num_steps=12, learning_rate=3e-3)
    assert losses[-1] < 0.9 * losses[0]


def test_weights_are_shared_as_they_should_be():
    gpt, llama = (load_model(name).model for name in ("gpt-tiny", "llama-tiny"))
    assert isinstance(gpt, GPT)
    assert gpt.head.weight is gpt.embedding.weight
    assert isinstance(llama, Llama)
    assert llama.head.weight is not llama.embedding.weight


def test_dropout_drops_only_while_training():
    shape = replace(load_shape("gpt-tiny"), dropout=0.5, sequence_length=16)
    model, ((tokens,), _) = shape.build(), shape.batch()
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


# --- export ---


class WithLoss(torch.nn.Module):
    def __init__(self, source):
        super().__init__()
        self.model, self.loss = source.model, source.loss

    def forward(self, inputs, targets):
        return self.loss(self.model(inputs), targets)


@every_family
def test_one_export_serves_every_batch_size(name):
    source = small(name)
    whole = WithLoss(source)
    sizes = ({0: Dim.AUTO}, {0: Dim.AUTO})
    exported = export(whole, (*source.inputs, *source.targets), dynamic_shapes=sizes, strict=False)
    captured = exported.module(check_guards=False)
    (inputs,), (targets,) = source.inputs, source.targets
    for batch_size in (1, 2, 5):
        batch = [tensor.repeat(2, *[1] * (tensor.ndim - 1))[:batch_size] for tensor in (inputs, targets)]
        results = []
        for module in (captured, whole):
            module.zero_grad()
            torch.manual_seed(batch_size)
            loss = module(*batch)
            loss.backward()
            results.append([loss.detach(), *(p.grad.clone() for _, p in sorted(module.named_parameters()))])
        assert len(results[0]) == len(results[1])
        for left, right in zip(*results, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-14)
