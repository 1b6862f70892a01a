"""What one device runs in a training step of a transformer: every op with its sizes, and how often.

A row is a matrix product, attention without stored scores, a pass over memory or a collective; any predictor of ops can
price it. With T tokens of a microbatch on a device, h hidden, f inner width, t = tp, and r = local tokens (T, or T / t
with sequence parallelism):

    forward    qkv, scores, softmax, values, projection, up, activation, down; two norms and two residuals over r·h
    backward   input gradients (m, k, n) and weight gradients (k, n, m) of every product; the passes' own backward
    tensor     per block one all-reduce of T·h forward and one backward; with sequence parallelism an all-gather and a
               reduce-scatter each, and one more all-gather backward (Korthikanti et al., MLSys 2023, section 4.2.2)
    context    keys and values of the whole sequence are gathered, their gradients scattered
    expert     tokens · top_k · h to the experts and back, forward and backward

Bytes of passes are counted by tensors read and written (definition of the kernels of Megatron-LM with bias, dropout
and activation fused; a mask of dropout is one byte per element). FLOPs summed over the rows are Megatron's formula
(Narayanan et al., SC 2021, appendix): 24·b·s·h² + 4·b·s²·h per layer forward, twice that backward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright.cost.steps.counted import (
    CountedOp,
    bmm_op,
    collective_op,
    gradient_ops,
    matmul_op,
    memory_op,
    norm_op,
)
from meshwright.cost.transformer import HALF, SINGLE, check_layout

if TYPE_CHECKING:
    from meshwright.cost.transformer import Experts, LatentAttention, TrainingSetup, TransformerShape

# Megatron-LM's fused softmax takes sequences times heads of a device four at a time; other numbers go through torch's,
# in single precision (megatron/model/fused_softmax.py: attn_batches % 4).
_SOFTMAX_BATCHES = 4


def layer_ops(shape: TransformerShape, setup: TrainingSetup, layer: int) -> tuple[CountedOp, ...]:
    """All ops of one layer for one microbatch, forward and backward, nothing recomputed.

    Raises TransformerError for a setup in which the model cannot be laid out.
    """
    check_layout(shape, setup)
    experts = None if shape.is_dense(layer) else shape.experts
    forward = [*_attention(shape, setup), *_feed_forward(shape, setup, experts), *_block_passes(shape, setup)]
    return (
        *forward,
        *(gradient for op in forward for gradient in gradient_ops(op)),
        *_collectives(shape, setup, experts),
    )


def head_ops(shape: TransformerShape, setup: TrainingSetup) -> tuple[CountedOp, ...]:
    """The last norm, the product with the vocabulary and the loss, forward and backward."""
    tokens, vocab = setup.tokens, -(-shape.vocab // setup.tp)
    forward = [
        matmul_op("logits", tokens, vocab, shape.hidden),
        norm_op("last norm", setup.local_tokens * shape.hidden),
        # Logits become single precision; largest, shift, exponential, sum and division each pass over them: 4, 8, 8, 4
        # and 8 bytes (Megatron-LM, vocabulary-parallel cross entropy). Backward scales in place and returns to 16 bits.
        memory_op(
            "loss",
            (HALF + SINGLE + 8 * SINGLE) * tokens * vocab,
            gradient_bytes=(3 * SINGLE + HALF) * tokens * vocab,
        ),
    ]
    return (*forward, *(gradient for op in forward for gradient in gradient_ops(op)))


def embedding_ops(shape: TransformerShape, setup: TrainingSetup, *, by_products: bool = False) -> tuple[CountedOp, ...]:
    """Rows of the table are read and written; backward adds their gradients.

    ``by_products``: rows of words and positions are taken by products with one-hot rows, and so are the gradients.
    """
    moved = 2 * HALF * setup.tokens * shape.hidden
    if by_products:
        words = -(-shape.vocab // setup.tp)
        chosen = memory_op("one-hot rows", HALF * setup.tokens * words)
        products = [matmul_op("embedding", setup.tokens, shape.hidden, rows) for rows in (words, shape.max_positions)]
        return (chosen, *products, *(gradient for op in products for gradient in gradient_ops(op)))
    forward = memory_op("embedding", moved, gradient_bytes=2 * moved)
    return (forward, *gradient_ops(forward))


def recomputed_ops(ops: tuple[CountedOp, ...], recompute: str) -> tuple[CountedOp, ...]:
    """Which ops of a layer run again in the backward (`cost.transformer.Recompute`)."""
    forward = tuple(op for op in ops if op.part == "forward")
    if recompute == "full":
        return forward
    if recompute == "selective":
        return tuple(op for op in forward if op.in_core)
    if recompute == "op":
        halved = tuple(replace(op, count=op.count / 2) for op in forward if op.op == "matmul")
        return (*halved, *(op for op in forward if op.op == "memory"))
    return ()


def _attention(shape: TransformerShape, setup: TrainingSetup) -> list[CountedOp]:
    if shape.latent is not None:
        return _latent_attention(shape, shape.latent, setup)
    tokens, tp = setup.tokens, setup.tp
    heads, kv_heads = shape.heads // tp, shape.local_kv_heads(tp)
    queries = setup.seq // setup.cp
    out = heads * shape.head_dim
    ops = [
        matmul_op("qkv", tokens, out + 2 * kv_heads * shape.head_dim, shape.hidden),
        matmul_op("projection", tokens, shape.hidden, out),
        memory_op("heads in order", 2 * HALF * tokens * out),
    ]
    if shape.max_positions == 0:
        ops.append(memory_op("rotary", 2 * HALF * tokens * (out + kv_heads * shape.head_dim)))
    if setup.fused_attention:
        return [*ops, _fused(setup, heads, kv_heads, shape.head_dim, queries)]
    batch = setup.microbatch_size * heads
    scores = batch * queries * setup.seq
    # Dropout reads, writes, and has its mask.
    dropout = (2 * HALF + 1) * scores
    return [
        *ops,
        bmm_op("scores", batch, queries, setup.seq, shape.head_dim),
        *(_softmax(scores, fused=batch % _SOFTMAX_BATCHES == 0) if setup.fused_softmax else [_reductions(scores)]),
        *([memory_op("attention dropout", dropout, gradient_bytes=dropout, in_core=True)] if shape.dropout else []),
        bmm_op("values", batch, queries, shape.head_dim, setup.seq),
    ]


def _reductions(scores: int) -> CountedOp:
    """Largest, sum and division each read the scores; backward a sum and what is made of it read gradients and results.

    So they are three kernels and two where a kernel ends with its reduction, as those of XLA did.
    """
    return memory_op("softmax", 4 * HALF * scores, gradient_bytes=5 * HALF * scores, in_core=True)


def _softmax(scores: int, *, fused: bool) -> list[CountedOp]:
    """Reads and writes the scores (backward: reads two, writes one), or as many kernels in single precision."""
    if fused:
        return [memory_op("softmax", 2 * HALF * scores, gradient_bytes=3 * HALF * scores, in_core=True)]
    widened = (HALF + SINGLE) * scores
    whole = 2 * SINGLE * scores
    return [
        memory_op("scores widened", widened, in_core=True),
        memory_op("scores scaled", whole, in_core=True),
        memory_op("mask", HALF // 2 * scores, in_core=True),
        memory_op("scores masked", whole, in_core=True),
        memory_op("softmax", whole, gradient_bytes=3 * SINGLE * scores, in_core=True),
        memory_op("probabilities narrowed", widened, in_core=True),
    ]


def _latent_attention(shape: TransformerShape, latent: LatentAttention, setup: TrainingSetup) -> list[CountedOp]:
    tokens, heads = setup.tokens, shape.heads // setup.tp
    width = latent.content_dim + latent.rotary_dim
    return [
        matmul_op("query down", tokens, latent.query_rank, shape.hidden),
        matmul_op("query up", tokens, heads * width, latent.query_rank),
        matmul_op("kv down", tokens, latent.kv_rank + latent.rotary_dim, shape.hidden),
        matmul_op("kv up", tokens, heads * (latent.content_dim + latent.value_dim), latent.kv_rank),
        matmul_op("projection", tokens, shape.hidden, heads * latent.value_dim),
        memory_op("latent norms", 2 * HALF * tokens * (latent.query_rank + latent.kv_rank)),
        memory_op("heads in order", 2 * HALF * tokens * heads * (2 * width + latent.value_dim)),
        _fused(setup, heads, heads, (width + latent.value_dim) // 2, setup.seq // setup.cp),
    ]


def _fused(setup: TrainingSetup, heads: int, kv_heads: int, head_dim: int, queries: int) -> CountedOp:
    sizes = {
        "batch": setup.microbatch_size,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "queries": queries,
        "keys": setup.seq,
        "products": 2,
    }
    return CountedOp(name="attention", op="attention", sizes=tuple(sizes.items()), in_core=True)


def _feed_forward(shape: TransformerShape, setup: TrainingSetup, experts: Experts | None) -> list[CountedOp]:
    if experts is None:
        return _gated_products(setup.tokens, shape.hidden, shape.ffn // setup.tp, shape.gated)
    # Tokens spread evenly over the experts; a device computes its share of them.
    local = experts.num_experts // setup.ep
    tokens = max(setup.tokens * experts.top_k // local, 1)
    routed = _gated_products(tokens, shape.hidden, max(experts.ffn // setup.tp, 1), experts.gated)
    ops = [replace(op, count=float(local)) for op in routed]
    if experts.num_shared:
        width = max(experts.num_shared * experts.ffn // setup.tp, 1)
        ops += _gated_products(setup.tokens, shape.hidden, width, experts.gated)
    ops.append(matmul_op("router", setup.tokens, experts.num_experts, shape.hidden))
    return [*ops, *_dispatch(shape, setup, experts)]


def _dispatch(shape: TransformerShape, setup: TrainingSetup, experts: Experts) -> list[CountedOp]:
    """How tokens come to their experts and back."""
    if not experts.group:
        # They are put in the experts' order and back: read and written twice.
        return [memory_op("permute", 4 * HALF * setup.tokens * experts.top_k * shape.hidden)]
    # Products with masks of a group's tokens by all places that its experts have; the mask of those that go out has no
    # gradient. Two masks are written, of weights and of truth values.
    places, groups = experts.top_k * experts.group, max(setup.tokens // experts.group, 1)
    out = bmm_op("dispatch", groups, places, shape.hidden, experts.group)
    back = bmm_op("combine", groups, experts.group, shape.hidden, places)
    masks = memory_op("masks", (HALF + 1) * groups * experts.group * places)
    return [masks, replace(out, in_core=False, first=True), replace(back, in_core=False)]


def _gated_products(tokens: int, hidden: int, ffn: int, gated: bool) -> list[CountedOp]:
    return [
        matmul_op("up", tokens, 2 * ffn if gated else ffn, hidden),
        memory_op(
            "activation",
            (3 if gated else 2) * HALF * tokens * ffn,
            gradient_bytes=(5 if gated else 3) * HALF * tokens * ffn,
        ),
        matmul_op("down", tokens, hidden, ffn),
    ]


def _block_passes(shape: TransformerShape, setup: TrainingSetup) -> list[CountedOp]:
    elements = setup.local_tokens * shape.hidden
    dropout = elements if shape.dropout else 0
    # Backward adds the gradients of the two branches; dropout reads, masks and writes; each bias sums a gradient.
    branches = 3 * HALF * elements + (2 * HALF * elements + dropout if shape.dropout else 0)
    biases = HALF * elements if shape.biased else 0
    residual = memory_op("residual", 3 * HALF * elements + dropout, gradient_bytes=branches + biases)
    return [replace(op, count=2.0) for op in (norm_op("norm", elements), residual)]


def _collectives(shape: TransformerShape, setup: TrainingSetup, experts: Experts | None) -> list[CountedOp]:
    ops: list[CountedOp] = []
    whole = HALF * setup.tokens * shape.hidden
    # With experts laid out over the tensor group's devices too, their blocks talk as dense ones do.
    if setup.tp > 1 and setup.sequence_parallel:
        ops += [collective_op(op, whole, "tensor", "forward") for op in ("all_gather", "reduce_scatter")]
        ops.append(collective_op("all_gather", whole, "tensor", "input_gradient"))
        ops.append(collective_op("all_gather", whole, "tensor", "input_gradient", hidden_by="input_gradient"))
        ops.append(collective_op("reduce_scatter", whole, "tensor", "input_gradient", hidden_by="weight_gradient"))
    elif setup.tp > 1:
        ops.append(collective_op("all_reduce", whole, "tensor", "forward"))
        ops.append(collective_op("all_reduce", whole, "tensor", "input_gradient", hidden_by="weight_gradient"))
    ops = [replace(op, count=2.0) for op in ops]
    if setup.cp > 1:
        keys = HALF * setup.microbatch_size * setup.seq * 2 * shape.local_kv_heads(setup.tp) * shape.head_dim
        ops.append(collective_op("all_gather", keys, "context", "forward", hidden_by="forward"))
        ops.append(collective_op("all_gather", keys, "context", "input_gradient", hidden_by="input_gradient"))
        ops.append(collective_op("reduce_scatter", keys, "context", "input_gradient", hidden_by="input_gradient"))
    if experts is not None and setup.ep > 1:
        routed = whole * experts.top_k * setup.ep
        ops += [replace(collective_op("all_to_all", routed, "expert", "forward"), count=2.0)]
        ops += [replace(collective_op("all_to_all", routed, "expert", "input_gradient"), count=2.0)]
    return ops
