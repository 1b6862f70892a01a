"""What a transformer keeps on a device, from its sizes alone: parameters of a stage, saved activations of a layer.

With t tokens of a microbatch on the device, t' of them in norms and dropouts (sequence parallelism), hidden h, a heads
of width d and k of keys and values, inner width f, and two bytes an element, a layer keeps for its backward

    attention   2·t'·2h (input of the norm and of the product) + 2·t·(2a + 2k)·d / tp (queries, keys, values, result)
    scores      5·t·a·s / tp (softmax, mask, dropped softmax), 2·t·a·s / tp without dropout, fused only sums: 4·t·a / tp
    feed-forward 2·t'·2h + 2·t·(wide + f) / tp, wide = f, or 2f where gated; dropout masks 1·t'·h each

which for a GPT is Korthikanti et al. (MLSys 2023), equations 2, 4 and 6: s·b·h·(10 + 24/tp + 5·a·s/(h·tp)). Experts
keep it for each of a token's top_k, latent attention for the tensors of its two ranks.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.cost.transformer import TrainingSetup, TransformerShape

# Bytes of an activation, a parameter and a gradient in 16 bits, of a logarithm of sums in 32.
_HALF, _FULL = 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParameters:
    """Parameters on one device: ``dense`` ones, which all data-parallel ranks have, and those of its ``experts``.

    ``head`` and ``embedding`` are part of ``dense``. ``products`` counts the matrices of layers by (rows, columns).
    """

    dense: int
    experts: int
    head: int
    embedding: int
    largest_layer: int
    products: Counter[tuple[int, int]]


def layers_of_stage(shape: TransformerShape, setup: TrainingSetup, stage: int) -> tuple[int, ...]:
    """Indices of the layers that a pipeline stage holds.

    Where they do not divide evenly, the last and the first part have one fewer, then those next to them, for they hold
    head and embedding (torchtitan, generate_llm_fqn_per_model_part; Qi et al., ICLR 2024, section 5.1).
    """
    parts = setup.pp * setup.chunks
    inwards = [part for pair in zip(reversed(range(parts)), range(parts), strict=True) for part in pair][:parts]
    fewer = set(inwards[: -shape.layers % parts])
    most = -(-shape.layers // parts)
    starts = list(itertools.accumulate((most - (part in fewer) for part in range(parts)), initial=0))
    mine = range(stage, parts, setup.pp)
    return tuple(layer for part in mine for layer in range(starts[part], starts[part + 1]))


def count_parameters(shape: TransformerShape, setup: TrainingSetup, stage: int) -> StageParameters:
    """Parameters of a device of one stage. Biases and norms are not split, matrices are split over tp."""
    products: Counter[tuple[int, int]] = Counter()
    dense = experts = largest = 0
    for layer in layers_of_stage(shape, setup, stage):
        shared, routed = _products_of_layer(shape, setup, layer)
        products += shared + routed
        own = _elements(shared) + _unsplit(shape, layer)
        own_experts = _elements(routed)
        dense, experts = dense + own, experts + own_experts
        largest = max(largest, own + own_experts)
    first, last = stage == 0, stage == setup.pp - 1
    words = shape.vocab * shape.hidden // setup.tp
    embedding = words if first or (last and shape.tied and setup.pp > 1) else 0
    embedding += shape.max_positions * shape.hidden if first else 0
    head = words if last and not shape.tied else 0
    final_norm = _norm_elements(shape) if last else 0
    return StageParameters(
        dense=dense + embedding + head + final_norm,
        experts=experts,
        head=head,
        embedding=embedding,
        largest_layer=largest,
        products=products,
    )


def saved_bytes(shape: TransformerShape, setup: TrainingSetup, layer: int) -> dict[str, int]:
    """Bytes that one layer keeps of one microbatch, by what they are."""
    whole = {"layer input": _HALF * setup.local_tokens * shape.hidden}
    if setup.recompute == "full":
        return whole
    if setup.recompute == "op":
        return whole | _saved_by_op(shape, setup)
    return whole | _saved_by_attention(shape, setup) | _saved_by_feed_forward(shape, setup, layer)


def head_bytes(shape: TransformerShape, setup: TrainingSetup) -> int:
    """Bytes that the last norm and the input of the head's product keep."""
    return 2 * _HALF * setup.local_tokens * shape.hidden


def logits(shape: TransformerShape, setup: TrainingSetup) -> int:
    """Elements of a device's logits of one microbatch."""
    return setup.tokens * shape.vocab // setup.tp


def in_flight(setup: TrainingSetup, stage: int) -> float:
    """Microbatches whose activations a stage holds at most, in units of all of its layers.

    1F1B holds one per stage from here to the last. Interleaved with v chunks, the first stages warm up further
    (Narayanan et al., SC 2021, section 2.2): 2·(p - 1 - stage) + (v - 1)·p + 1 chunks, each 1/v of the layers. Zero
    bubble schedules hold no more than 1F1B ("zb-1p") or twice as much ("zb-2p"; Qi et al., ICLR 2024, section 4);
    GPipe holds all.
    """
    name, later = setup.schedule.lower(), setup.pp - 1 - stage
    if "gpipe" in name:
        return setup.num_microbatches
    if setup.chunks > 1:
        warm = 2 * later + (setup.chunks - 1) * setup.pp + 1
        return min(warm, setup.num_microbatches * setup.chunks) / setup.chunks
    held = min(2 * setup.pp - 1, 2 * (later + 1)) if "zb-2p" in name else later + 1
    return min(held, setup.num_microbatches)


def _products_of_layer(
    shape: TransformerShape, setup: TrainingSetup, layer: int
) -> tuple[Counter[tuple[int, int]], Counter[tuple[int, int]]]:
    """Matrices of a layer on one device by (rows, columns): those of all ranks, those of its experts."""
    hidden, split = shape.hidden, setup.tp
    shared: Counter[tuple[int, int]] = Counter()
    if shape.latent is None:
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        shared[(hidden, width // split)] += 1
        shared[(shape.heads * shape.head_dim // split, hidden)] += 1
    else:
        latent = shape.latent
        shared[(hidden, latent.query_rank)] += 1
        shared[(latent.query_rank, shape.heads * (latent.content_dim + latent.rotary_dim) // split)] += 1
        shared[(hidden, latent.kv_rank + latent.rotary_dim)] += 1
        shared[(latent.kv_rank, shape.heads * (latent.content_dim + latent.value_dim) // split)] += 1
        shared[(shape.heads * latent.value_dim // split, hidden)] += 1
    routed: Counter[tuple[int, int]] = Counter()
    if shape.experts is None or shape.is_dense(layer):
        shared[(hidden, _wide(shape) // split)] += 1
        shared[(shape.ffn // split, hidden)] += 1
    else:
        experts = shape.experts
        routed[(hidden, 2 * experts.ffn // split)] += experts.num_experts // setup.ep
        routed[(experts.ffn // split, hidden)] += experts.num_experts // setup.ep
        shared[(hidden, 2 * experts.ffn * experts.num_shared // split)] += min(experts.num_shared, 1)
        shared[(experts.ffn * experts.num_shared // split, hidden)] += min(experts.num_shared, 1)
        shared[(hidden, experts.num_experts)] += 1
    return shared, routed


def _unsplit(shape: TransformerShape, layer: int) -> int:
    """Elements of a layer's norms and biases."""
    norms = 2 * _norm_elements(shape)
    if shape.latent is not None:
        norms += shape.latent.query_rank + shape.latent.kv_rank
    biases = (shape.heads + 2 * shape.kv_heads) * shape.head_dim + 2 * shape.hidden + _wide(shape)
    return norms + (biases if shape.biased and shape.is_dense(layer) else 0)


def _norm_elements(shape: TransformerShape) -> int:
    return shape.hidden * (2 if shape.biased else 1)


def _wide(shape: TransformerShape) -> int:
    return shape.ffn * (2 if shape.gated else 1)


def _elements(products: Counter[tuple[int, int]]) -> int:
    return sum(rows * columns * count for (rows, columns), count in products.items())


def _saved_by_attention(shape: TransformerShape, setup: TrainingSetup) -> dict[str, int]:
    tokens, local = setup.tokens, setup.local_tokens
    saved = {"input of queries, keys and values": _HALF * local * shape.hidden}
    if shape.latent is None:
        width = 2 * shape.kv_heads * shape.head_dim + shape.heads * shape.head_dim
        result = shape.heads * shape.head_dim
    else:
        latent = shape.latent
        # Both ranks before and after their norms.
        saved["ranks of queries, keys and values"] = (
            _HALF * tokens * (2 * latent.query_rank + 2 * latent.kv_rank + latent.rotary_dim)
        )
        width = shape.heads * (2 * (latent.content_dim + latent.rotary_dim) + latent.value_dim)
        result = shape.heads * latent.value_dim
    saved["queries, keys and values"] = _HALF * tokens * width // setup.tp
    saved["result of attention"] = _HALF * tokens * result // setup.tp
    if setup.fused_attention:
        saved["sums of scores"] = _FULL * tokens * shape.heads // setup.tp
    elif setup.recompute != "selective":
        per_score = 2 * _HALF + 1 if shape.dropout else _HALF
        saved["scores"] = per_score * tokens * shape.heads * setup.seq // setup.tp
    if shape.dropout:
        saved["dropout mask after attention"] = local * shape.hidden
    return saved


def _saved_by_feed_forward(shape: TransformerShape, setup: TrainingSetup, layer: int) -> dict[str, int]:
    tokens, local = setup.tokens, setup.local_tokens
    saved = {"input of the second norm": _HALF * local * shape.hidden}
    saved["input of the feed-forward"] = _HALF * local * shape.hidden
    if shape.experts is None or shape.is_dense(layer):
        saved["inner of the feed-forward"] = _HALF * tokens * (_wide(shape) + shape.ffn) // setup.tp
    else:
        experts = shape.experts
        # Of each of a token's experts: its input, the two halves before the gate, and their product.
        saved["experts"] = _HALF * tokens * experts.top_k * (shape.hidden + 3 * experts.ffn) // setup.tp
        saved["shared experts"] = _HALF * tokens * experts.num_shared * 3 * experts.ffn // setup.tp
        saved["router"] = 2 * _FULL * tokens * experts.num_experts
    if shape.dropout:
        saved["dropout mask after the feed-forward"] = local * shape.hidden
    return saved


def _saved_by_op(shape: TransformerShape, setup: TrainingSetup) -> dict[str, int]:
    """What torchtitan's policy keeps of a gated layer: results of attention, of products 1, 3, 5 and 7, of scatters."""
    tokens = setup.tokens
    scattered = 2 * _HALF * setup.local_tokens * shape.hidden if setup.tp > 1 else 0
    return {
        "queries": _HALF * tokens * shape.heads * shape.head_dim // setup.tp,
        "values": _HALF * tokens * shape.kv_heads * shape.head_dim // setup.tp,
        "result of attention": _HALF * tokens * shape.heads * shape.head_dim // setup.tp,
        "sums of scores": _FULL * tokens * shape.heads // setup.tp,
        "gate": _HALF * tokens * shape.ffn // setup.tp,
        "result of the feed-forward": _HALF * tokens * shape.hidden + scattered,
    }
