"""The later families compute what their papers say: against transformers with equal weights, or written out again."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from meshwright.zoo import Llama, load_model, load_shape
from meshwright.zoo.diffusion import NUM_STEPS
from meshwright.zoo.mixtral import capacity
from meshwright.zoo.t5 import RelativeBias

from .sources import losses_of_steps, small

# How transformers calls the linear layers of attention.
LETTERS = {"q": "query", "k": "key", "v": "value", "o": "projection"}


def load_renamed(target, state, names):
    """Load a state under the names that ``names`` gives; returns the names that were not given."""
    renamed = {new: make(state) for new, make in names.items()}
    missing, unexpected = target.load_state_dict(renamed, strict=False)
    assert not unexpected
    return [name for name in missing if not name.endswith("position_ids")]


def take(name):
    return lambda state: state[name]


def taken(pairs, kinds=("weight",)):
    """For layers that differ in nothing but their name: of every pair (theirs, ours), what they hold."""
    return {f"{theirs}.{kind}": take(f"{ours}.{kind}") for theirs, ours in pairs.items() for kind in kinds}


def third(name, index):
    return lambda state: state[name].chunk(3)[index]


def test_bert_is_bert():
    from transformers import BertConfig, BertForPreTraining

    source, shape = small("bert-tiny"), load_shape("bert-tiny")
    config = BertConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        intermediate_size=4 * shape.width,
        max_position_embeddings=shape.context,
    )
    other = BertForPreTraining(config).double().eval()
    names = taken(
        {
            "bert.embeddings.word_embeddings": "embedding",
            "bert.embeddings.position_embeddings": "position",
            "bert.embeddings.token_type_embeddings": "segment",
            "cls.predictions.decoder": "embedding",
        }
    )
    pairs = {
        "bert.embeddings.LayerNorm": "norm",
        "bert.pooler.dense": "pool",
        "cls.predictions.transform.dense": "transform",
        "cls.predictions.transform.LayerNorm": "transform_norm",
        "cls.seq_relationship": "pair_head",
    }
    for layer in range(shape.num_layers):
        theirs, ours = f"bert.encoder.layer.{layer}", f"blocks.{layer}"
        pairs |= {
            f"{theirs}.attention.output.dense": f"{ours}.projection",
            f"{theirs}.attention.output.LayerNorm": f"{ours}.attention_norm",
            f"{theirs}.intermediate.dense": f"{ours}.widen",
            f"{theirs}.output.dense": f"{ours}.narrow",
            f"{theirs}.output.LayerNorm": f"{ours}.mlp_norm",
        }
        for index, part in enumerate(("query", "key", "value")):
            for kind in ("weight", "bias"):
                names[f"{theirs}.attention.self.{part}.{kind}"] = third(f"{ours}.query_key_value.{kind}", index)
    names |= taken(pairs, ("weight", "bias"))
    names |= {"cls.predictions.bias": take("head.bias"), "cls.predictions.decoder.bias": take("head.bias")}
    assert load_renamed(other, source.model.state_dict(), names) == []

    tokens, segments, positions = source.inputs
    expected = other(input_ids=tokens, token_type_ids=segments)
    source.model.eval()
    token_logits, pair_logits = source.model(*source.inputs)
    masked = torch.stack([logits[rows] for logits, rows in zip(expected.prediction_logits, positions, strict=True)])
    torch.testing.assert_close(token_logits, masked, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(pair_logits, expected.seq_relationship_logits, rtol=1e-9, atol=1e-11)

    labels, pairs = source.targets
    at = torch.full_like(tokens, -100).scatter(1, positions, labels)
    loss = other(input_ids=tokens, token_type_ids=segments, labels=at, next_sentence_label=pairs).loss
    torch.testing.assert_close(source.compute_loss(), loss, rtol=1e-9, atol=1e-11)


def test_t5_is_t5():
    from transformers import T5Config, T5ForConditionalGeneration

    source, shape = small("t5-tiny"), load_shape("t5-tiny")
    config = T5Config(
        vocab_size=shape.vocabulary,
        d_model=shape.width,
        d_kv=shape.head_width,
        d_ff=shape.hidden_width,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        relative_attention_num_buckets=shape.num_buckets,
        relative_attention_max_distance=shape.max_distance,
    )
    other = T5ForConditionalGeneration(config).double().eval()
    pairs = dict.fromkeys(("shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head"), "embedding")
    for stack, last in (("encoder", 1), ("decoder", 2)):
        first = f"{stack}.block.0.layer.0.SelfAttention"
        pairs[f"{first}.relative_attention_bias"] = f"{stack}_bias.table"
        pairs[f"{stack}.final_layer_norm"] = f"{stack}_norm"
        for layer in range(shape.num_layers):
            theirs, ours = f"{stack}.block.{layer}.layer", f"{stack}.{layer}"
            parts = [(0, "SelfAttention", "attention")] + [(1, "EncDecAttention", "cross")] * (last == 2)
            for index, kind, mine in parts:
                pairs[f"{theirs}.{index}.layer_norm"] = f"{ours}.{mine}_norm"
                for letter, part in LETTERS.items():
                    pairs[f"{theirs}.{index}.{kind}.{letter}"] = f"{ours}.{mine}.{part}"
            pairs[f"{theirs}.{last}.layer_norm"] = f"{ours}.mlp_norm"
            pairs[f"{theirs}.{last}.DenseReluDense.wi"] = f"{ours}.mlp.widen"
            pairs[f"{theirs}.{last}.DenseReluDense.wo"] = f"{ours}.mlp.narrow"
    assert load_renamed(other, source.model.state_dict(), taken(pairs)) == []

    tokens, decoder_tokens = source.inputs
    source.model.eval()
    expected = other(input_ids=tokens, decoder_input_ids=decoder_tokens).logits
    # Transformers computes the norms in float32.
    torch.testing.assert_close(source.model(tokens, decoder_tokens), expected, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["t5-tiny", "t5-base"])
def test_distances_fall_into_the_buckets_of_t5(name, causal):
    from transformers.models.t5.modeling_t5 import T5Attention

    shape = load_shape(name)
    distances = torch.arange(-700, 701)
    expected = T5Attention._relative_position_bucket(distances, not causal, shape.num_buckets, shape.max_distance)
    assert torch.equal(RelativeBias(shape, causal=causal).buckets(distances), expected)
    assert len(expected.unique()) == shape.num_buckets - (0 if causal else 1)


def renamed_mixtral(shape):
    """Transformers' names of the layers that a Llama has, too."""
    pairs = {"model.embed_tokens": "embedding", "model.norm": "norm", "lm_head": "head"}
    for layer in range(shape.num_layers):
        theirs, ours = f"model.layers.{layer}", f"blocks.{layer}"
        pairs |= {
            f"{theirs}.input_layernorm": f"{ours}.attention_norm",
            f"{theirs}.post_attention_layernorm": f"{ours}.mlp_norm",
            f"{theirs}.mlp.gate": f"{ours}.router.gate",
        }
        for letter, part in LETTERS.items():
            pairs[f"{theirs}.self_attn.{letter}_proj"] = f"{ours}.attention.{part}"
    return taken(pairs)


def test_a_mixtral_that_drops_nothing_is_mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    shape = load_shape("mixtral-tiny")
    shape = replace(shape, capacity_factor=shape.num_experts / shape.num_chosen, batch_size=3, sequence_length=20)
    torch.manual_seed(0)
    model, ((tokens,), _) = shape.build().double(), shape.batch()
    config = MixtralConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.hidden_width,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_key_value_heads,
        num_local_experts=shape.num_experts,
        num_experts_per_tok=shape.num_chosen,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_base},
        sliding_window=None,
        experts_implementation="eager",
    )
    other = MixtralForCausalLM(config).double().eval()
    names = renamed_mixtral(shape)
    for layer in range(shape.num_layers):
        ours = f"blocks.{layer}.experts"
        names[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = lambda state, at=ours: torch.cat(
            (state[f"{at}.gate"], state[f"{at}.up"]), dim=2
        ).transpose(1, 2)
        names[f"model.layers.{layer}.mlp.experts.down_proj"] = lambda state, at=ours: state[f"{at}.down"].transpose(
            1, 2
        )
    assert load_renamed(other, model.state_dict(), names) == []
    # Tables of angles are float32 in both.
    torch.testing.assert_close(model(tokens)[0], other(input_ids=tokens).logits, rtol=1e-5, atol=1e-7)


def route_by_hand(layer, y, room):
    """Experts of one sequence, token by token: first choices before second ones, at most ``room`` per expert."""
    probabilities = (y @ layer.router.gate.weight.T).softmax(-1)
    order = probabilities.argsort(descending=True)
    taken, out, dropped = [0] * layer.router.num_experts, torch.zeros_like(y), 0
    for choice in range(layer.router.num_chosen):
        for token, (row, experts) in enumerate(zip(probabilities, order, strict=True)):
            expert = int(experts[choice])
            if taken[expert] == room:
                dropped += 1
                continue
            taken[expert] += 1
            weight = row[expert] / row[experts[: layer.router.num_chosen]].sum()
            gate, up = y[token] @ layer.experts.gate[expert], y[token] @ layer.experts.up[expert]
            out[token] += weight * ((gate * gate.sigmoid() * up) @ layer.experts.down[expert])
    chosen = torch.zeros_like(probabilities).scatter(1, order[:, : layer.router.num_chosen], 1.0)
    share = chosen.mean(0) / layer.router.num_chosen
    return out, layer.router.num_experts * (share * probabilities.mean(0)).sum(), dropped


@pytest.mark.parametrize("factor", [0.3, 1.0, 1.25, 9.0])
def test_experts_take_no_more_than_their_capacity(factor):
    shape = replace(load_shape("mixtral-tiny"), capacity_factor=factor, num_layers=1)
    torch.manual_seed(3)
    layer = shape.build().double().blocks[0]
    y = torch.randn(2, 17, shape.width, dtype=torch.float64)
    room = min(17, math.ceil(factor * shape.num_chosen * 17 / shape.num_experts))
    assert capacity(17, shape.num_experts, shape.num_chosen, factor) == room
    places, weights, balance = layer.router(10 * y)
    found = layer.experts(10 * y, places, weights)
    for i, sequence in enumerate(10 * y):
        expected, expected_balance, dropped = route_by_hand(layer, sequence, room)
        assert (dropped > 0) == (factor < 1.25) or factor == 1.25
        torch.testing.assert_close(found[i], expected, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(balance[i], expected_balance, rtol=1e-9, atol=1e-11)


def test_adapters_are_a_change_of_the_frozen_weights():
    """LoRA's own claim: W + (α/r) B A in place of W is the same model."""
    source, shape = small("llama-lora-tiny"), load_shape("llama-lora-tiny")
    merged = {}
    for name, item in source.model.state_dict().items():
        if name.endswith(".base.weight"):
            at = name.removesuffix(".base.weight")
            state = source.model.state_dict()
            change = state[f"{at}.expand.weight"] @ state[f"{at}.reduce.weight"]
            merged[f"{at}.weight"] = item + shape.alpha / shape.rank * change
        elif ".reduce." not in name and ".expand." not in name:
            merged[name] = item
    plain = Llama(shape).double()
    plain.load_state_dict(merged)
    torch.testing.assert_close(source.model(*source.inputs), plain(*source.inputs), rtol=1e-9, atol=1e-11)
    source.compute_loss().backward()
    assert all((p.grad is not None) == p.requires_grad for p in source.model.parameters())


def test_fresh_adapters_change_nothing():
    shape = replace(load_shape("llama-lora-tiny"), batch_size=2, sequence_length=8)
    model, ((tokens,), _) = shape.build(), shape.batch()
    before = model(tokens)
    for name, parameter in model.named_parameters():
        if "reduce" in name:
            parameter.data.add_(1.0)
    assert torch.equal(model(tokens), before)


def lstm_by_hand(weights, x, suffix=""):
    """One layer over one sequence, cell by cell; gates in torch's order: in, forget, cell, out."""
    width = weights[f"weight_hh_l0{suffix}"].shape[1]
    hidden = cell = torch.zeros(width, dtype=x.dtype)
    rows = []
    for step in x if not suffix else x.flip(0):
        gates = weights[f"weight_ih_l0{suffix}"] @ step + weights[f"bias_ih_l0{suffix}"]
        gates = gates + weights[f"weight_hh_l0{suffix}"] @ hidden + weights[f"bias_hh_l0{suffix}"]
        enter, forget, new, leave = gates.chunk(4)
        cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
        hidden = leave.sigmoid() * cell.tanh()
        rows.append(hidden)
    return torch.stack(rows if not suffix else rows[::-1])


def gnmt_by_hand(state, tokens, decoder_tokens, num_layers):
    def layer(prefix, x):
        weights = {key.removeprefix(prefix): item for key, item in state.items() if key.startswith(prefix)}
        ways = [lstm_by_hand(weights, x, suffix) for suffix in ("", "_reverse") if f"weight_hh_l0{suffix}" in weights]
        return torch.cat(ways, dim=-1)

    x = state["embedding.weight"][tokens]
    for depth in range(num_layers):
        y = layer(f"encoder.{depth}.lstm.", x)
        x = x + y if depth >= 2 else y
    y = layer("query.lstm.", state["embedding.weight"][decoder_tokens])
    direction = state["attention.direction"] / state["attention.direction"].square().sum().sqrt()
    context = []
    for row in y:
        sums = state["attention.query.weight"] @ row + x @ state["attention.key.weight"].T + state["attention.bias"]
        scores = (sums.tanh() @ direction * state["attention.scale"]).exp()
        context.append((scores / scores.sum()) @ x)
    context = torch.stack(context)
    for depth in range(num_layers - 1):
        z = layer(f"decoder.{depth}.lstm.", torch.cat((y, context), dim=-1))
        y = y + z if depth >= 1 else z
    return y @ state["head.weight"].T + state["head.bias"]


def test_gnmt_is_recurrent_cell_by_cell():
    source, shape = small("gnmt-tiny"), load_shape("gnmt-tiny")
    source.model.eval()
    found = source.model(*source.inputs)
    state = source.model.state_dict()
    for i, (tokens, decoder_tokens) in enumerate(zip(*source.inputs, strict=True)):
        expected = gnmt_by_hand(state, tokens, decoder_tokens, shape.num_layers)
        torch.testing.assert_close(found[i], expected, rtol=1e-9, atol=1e-11)


def test_dlrm_is_dlrm():
    source, shape = small("dlrm-tiny", batch_size=4), load_shape("dlrm-tiny")
    state = source.model.state_dict()

    def perceptron(prefix, x, num_layers):
        for layer in range(num_layers):
            x = (state[f"{prefix}.{layer}.weight"] @ x + state[f"{prefix}.{layer}.bias"]).clamp(min=0)
        return x

    logits = []
    for numbers, categories in zip(*source.inputs, strict=True):
        dense = perceptron("bottom", numbers, len(shape.bottom_widths) + 1)
        vectors = [dense] + [state[f"embeddings.{i}.weight"][row] for i, row in enumerate(categories)]
        products = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i)]
        x = perceptron("top", torch.cat((dense, torch.stack(products))), len(shape.top_widths))
        logits.append(state["head.weight"][0] @ x + state["head.bias"][0])
    logits = torch.stack(logits)
    torch.testing.assert_close(source.model(*source.inputs), logits, rtol=1e-9, atol=1e-11)
    (clicks,) = source.targets
    chance = logits.sigmoid()
    expected = -(clicks * chance.log() + (1 - clicks) * (1 - chance).log()).mean()
    torch.testing.assert_close(source.compute_loss(), expected, rtol=1e-9, atol=1e-11)


def group_norm_by_hand(state, name, x, num_groups):
    grouped = x.unflatten(1, (num_groups, -1))
    centred = grouped - grouped.mean((2, 3, 4), keepdim=True)
    scaled = (centred / (centred.square().mean((2, 3, 4), keepdim=True) + 1e-6).sqrt()).flatten(1, 2)
    return scaled * state[f"{name}.weight"][:, None, None] + state[f"{name}.bias"][:, None, None]


def silu(x):
    return x / (1 + (-x).exp())


def residual_by_hand(state, at, x, time, num_groups):
    def conv(name, y, padding=1):
        return F.conv2d(y, state[f"{at}.{name}.weight"], state[f"{at}.{name}.bias"], padding=padding)

    y = conv("convolution1", silu(group_norm_by_hand(state, f"{at}.norm1", x, num_groups)))
    y = y + (time @ state[f"{at}.time.weight"].T + state[f"{at}.time.bias"])[:, :, None, None]
    y = conv("convolution2", silu(group_norm_by_hand(state, f"{at}.norm2", y, num_groups)))
    x = y + (conv("shortcut", x, 0) if f"{at}.shortcut.weight" in state else x)
    if f"{at}.attention.norm.weight" not in state:
        return x
    at = f"{at}.attention"
    flat = conv("query_key_value", group_norm_by_hand(state, f"{at}.norm", x, num_groups), 0).flatten(2)
    query, key, value = flat.tensor_split(3, dim=1)
    scores = (query.transpose(1, 2) @ key / math.sqrt(key.shape[1])).exp()
    mixed = value @ (scores / scores.sum(-1, keepdim=True)).transpose(1, 2)
    return x + conv("projection", mixed.unflatten(2, x.shape[2:]), 0)


def test_ddpm_is_ddpm():
    """Two levels of one block: stem, block, halving, block; two in the middle; two blocks, doubling, two blocks."""
    source, shape = small("ddpm-tiny"), load_shape("ddpm-tiny")
    source.model.eval()
    state, (x, steps) = source.model.state_dict(), source.inputs

    def conv(name, y, **options):
        return F.conv2d(y, state[f"{name}.weight"], state[f"{name}.bias"], **options)

    def block(name, y):
        return residual_by_hand(state, name, y, time, shape.num_groups)

    half = shape.width // 2
    angles = torch.tensor([[float(step) * 10000 ** (-i / (half - 1)) for i in range(half)] for step in steps])
    time = torch.cat((angles.sin(), angles.cos()), dim=1).double()
    for name in ("time_in", "time_out"):
        time = silu(time @ state[f"{name}.weight"].T + state[f"{name}.bias"])
    skips = [conv("stem", x, padding=1)]
    skips.append(block("encoder.0", skips[-1]))
    skips.append(conv("encoder.1.convolution", F.pad(skips[-1], (0, 1, 0, 1)), stride=2))
    skips.append(block("encoder.2", skips[-1]))
    x = block("middle.1", block("middle.0", skips[-1]))
    for index in (0, 1):
        x = block(f"decoder.{index}", torch.cat((x, skips.pop()), dim=1))
    x = conv("decoder.2.convolution", x.repeat_interleave(2, -1).repeat_interleave(2, -2), padding=1)
    for index in (3, 4):
        x = block(f"decoder.{index}", torch.cat((x, skips.pop()), dim=1))
    expected = conv("head", silu(group_norm_by_hand(state, "norm", x, shape.num_groups)), padding=1)
    # The angles are float32, and up to a thousand radians.
    torch.testing.assert_close(source.model(*source.inputs), expected, rtol=1e-3, atol=1e-4)
    assert not skips


def test_noise_is_mixed_in_by_its_step():
    """Of a batch, image = (noisy − √(1−ᾱ) noise) / √ᾱ has the variance 1 that it was drawn with."""
    shape = replace(load_shape("ddpm-tiny"), batch_size=400, image_size=8)
    torch.manual_seed(0)
    (noisy, steps), (noise,) = shape.batch()
    kept = torch.tensor(
        [math.prod(1 - (1e-4 + (0.02 - 1e-4) * i / (NUM_STEPS - 1)) for i in range(s + 1)) for s in steps]
    )
    kept = kept.view(-1, 1, 1, 1).double()
    images = (noisy - (1 - kept).sqrt() * noise)[kept.flatten() > 0.01] / kept[kept.flatten() > 0.01].sqrt()
    assert images.var().item() == pytest.approx(1.0, rel=0.02)
    assert noise.var().item() == pytest.approx(1.0, rel=0.02)


NEW = ["bert-tiny", "t5-tiny", "mixtral-tiny", "llama-lora-tiny", "gnmt-tiny", "dlrm-tiny", "ddpm-tiny"]


@pytest.mark.parametrize("name", NEW)
def test_a_few_steps_on_one_batch_lower_the_loss(name):
    source = load_model(name, batch_size=4)
    source.model.eval()  # without dropout, one batch has one loss
    losses = losses_of_steps(source, num_steps=10, learning_rate=1e-2)
    assert losses[-1] < 0.95 * losses[0]


def test_the_decoders_do_not_look_ahead():
    for name in ("t5-tiny", "gnmt-tiny"):
        source = small(name)
        source.model.eval()
        tokens, decoder_tokens = source.inputs
        changed = decoder_tokens.clone()
        changed[:, 7:] = (changed[:, 7:] + 1) % 512
        before, after = source.model(tokens, decoder_tokens), source.model(tokens, changed)
        torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-12)
        assert (before[:, 7:] - after[:, 7:]).abs().amax() > 0
        assert (source.model(tokens.flip(1), decoder_tokens) - before).abs().amin() > 0
