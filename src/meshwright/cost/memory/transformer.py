"""What a transformer keeps on a device, from its sizes alone: saved activations of a layer, microbatches in flight.

With t tokens of a microbatch on the device, t' of them in norms and dropouts (sequence parallelism), hidden h, a heads
of width d and k of keys and values, inner width f, and two bytes an element, a layer keeps for its backward

    attention   2·t'·2h (input of the norm and of the product) + 2·t·(2a + 2k)·d / tp (queries, keys, values, result)
    scores      5·t·a·s / tp (softmax, mask, dropped softmax), 2·t·a·s / tp without dropout, fused only sums: 4·t·a / tp
    feed-forward 2·t'·2h + 2·t·(wide + f) / tp, wide = f, or 2f where gated; dropout masks 1·t'·h each

which for a GPT is Korthikanti et al. (MLSys 2023), equations 2, 4 and 6: s·b·h·(10 + 24/tp + 5·a·s/(h·tp)). Experts
keep it for each of a token's top_k, latent attention for the tensors of its two ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.cost.parameters import gate_and_up
from meshwright.cost.transformer import HALF, SINGLE

if TYPE_CHECKING:
    from meshwright.cost.transformer import TrainingSetup, TransformerShape


def saved_bytes(shape: TransformerShape, setup: TrainingSetup, layer: int) -> dict[str, int]:
    """Bytes that one layer keeps of one microbatch, by what they are."""
    whole = {"layer input": HALF * setup.local_tokens * shape.hidden}
    if setup.recompute == "full":
        return whole
    if setup.recompute == "op":
        return whole | _saved_by_op(shape, setup)
    return whole | _saved_by_attention(shape, setup) | _saved_by_feed_forward(shape, setup, layer)


def head_bytes(shape: TransformerShape, setup: TrainingSetup) -> int:
    """Bytes that the last norm and the input of the head's product keep."""
    return 2 * HALF * setup.local_tokens * shape.hidden


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
    later = setup.pp - 1 - stage
    if setup.schedule == "gpipe":
        return setup.num_microbatches
    if setup.chunks > 1:
        warm = 2 * later + (setup.chunks - 1) * setup.pp + 1
        return min(warm, setup.num_microbatches * setup.chunks) / setup.chunks
    held = min(2 * setup.pp - 1, 2 * (later + 1)) if setup.schedule == "zb-2p" else later + 1
    return min(held, setup.num_microbatches)


def _saved_by_attention(shape: TransformerShape, setup: TrainingSetup) -> dict[str, int]:
    tokens, local = setup.tokens, setup.local_tokens
    saved = {"input of queries, keys and values": HALF * local * shape.hidden}
    if shape.latent is None:
        width = 2 * shape.local_kv_heads(setup.tp) * setup.tp * shape.head_dim + shape.heads * shape.head_dim
        result = shape.heads * shape.head_dim
    else:
        latent = shape.latent
        # Both ranks before and after their norms.
        saved["ranks of queries, keys and values"] = (
            HALF * tokens * (2 * latent.query_rank + 2 * latent.kv_rank + latent.rotary_dim)
        )
        width = shape.heads * (2 * (latent.content_dim + latent.rotary_dim) + latent.value_dim)
        result = shape.heads * latent.value_dim
    saved["queries, keys and values"] = HALF * tokens * width // setup.tp
    saved["result of attention"] = HALF * tokens * result // setup.tp
    if setup.fused_attention:
        saved["sums of scores"] = SINGLE * tokens * shape.heads // setup.tp
    elif setup.recompute != "selective":
        per_score = 2 * HALF + 1 if shape.dropout else HALF
        saved["scores"] = per_score * tokens * shape.heads * setup.seq // setup.tp
    if shape.dropout:
        saved["dropout mask after attention"] = local * shape.hidden
    return saved


def _saved_by_feed_forward(shape: TransformerShape, setup: TrainingSetup, layer: int) -> dict[str, int]:
    tokens, local = setup.tokens, setup.local_tokens
    saved = {"input of the second norm": HALF * local * shape.hidden}
    saved["input of the feed-forward"] = HALF * local * shape.hidden
    if shape.experts is None or shape.is_dense(layer):
        saved["inner of the feed-forward"] = HALF * tokens * (gate_and_up(shape) + shape.ffn) // setup.tp
    else:
        experts = shape.experts
        # Of each of a token's experts: its input, what its matrices into it make, and what the activation does of that.
        inner = experts.columns + experts.ffn
        saved["experts"] = HALF * tokens * experts.top_k * (shape.hidden + inner) // setup.tp
        saved["shared experts"] = HALF * tokens * experts.num_shared * inner // setup.tp
        saved["router"] = 2 * SINGLE * tokens * experts.num_experts
    if shape.dropout:
        saved["dropout mask after the feed-forward"] = local * shape.hidden
    return saved


def _saved_by_op(shape: TransformerShape, setup: TrainingSetup) -> dict[str, int]:
    """What torchtitan's policy keeps of a gated layer: results of attention, of products 1, 3, 5 and 7, of scatters."""
    tokens = setup.tokens
    scattered = 2 * HALF * setup.local_tokens * shape.hidden if setup.tp > 1 else 0
    return {
        "queries": HALF * tokens * shape.heads * shape.head_dim // setup.tp,
        "values": HALF * tokens * shape.kv_heads * shape.head_dim // setup.tp,
        "result of attention": HALF * tokens * shape.heads * shape.head_dim // setup.tp,
        "sums of scores": SINGLE * tokens * shape.heads // setup.tp,
        "gate": HALF * tokens * shape.ffn // setup.tp,
        "result of the feed-forward": HALF * tokens * shape.hidden + scattered,
    }
