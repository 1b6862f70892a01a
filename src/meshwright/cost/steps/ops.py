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

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from meshwright.cost.transformer import HALF, SINGLE, check_layout

if TYPE_CHECKING:
    from meshwright.cost.transformer import Experts, LatentAttention, TrainingSetup, TransformerShape

Op = Literal["matmul", "bmm", "attention", "memory", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
Part = Literal["forward", "input_gradient", "weight_gradient"]
Group = Literal["", "tensor", "context", "expert"]

# Matrix products of attention's backward without stored scores: scores again, and gradients of values, probabilities,
# queries and keys (Dao, FlashAttention-2, 2023, section 3.1).
_ATTENTION_BACKWARD_PRODUCTS = 5
# Megatron-LM's fused softmax takes sequences times heads of a device four at a time; other numbers go through torch's,
# in single precision (megatron/model/fused_softmax.py: attn_batches % 4).
_SOFTMAX_BATCHES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedOp:
    """One op of a layer, run ``count`` times per microbatch.

    ``sizes``: matmul m, n, k; bmm batch, m, n, k; attention batch, heads, kv_heads, head_dim, queries, keys, products
    (2 forward, 5 backward); memory bytes; collectives bytes (the full tensor). ``group``: whose ranks talk.
    ``in_core``: attention's core, which selective recompute runs again. ``weighted``: a product with a parameter.
    ``hidden_by``: the part whose products a collective may run beside. ``gradient_bytes``: what the backward of a pass
    moves.
    """

    name: str
    op: Op
    sizes: tuple[tuple[str, int], ...]
    part: Part = "forward"
    count: float = 1.0
    group: Group = ""
    in_core: bool = False
    weighted: bool = False
    hidden_by: Part | None = None
    gradient_bytes: int = 0

    @property
    def shapes(self) -> str:
        """The sizes as the measurement table writes them, ``m=4096;n=128;k=1536``."""
        return ";".join(f"{key}={value}" for key, value in self.sizes)

    @property
    def flops(self) -> float:
        """Operations of one run; 0 for passes over memory and collectives."""
        size = dict(self.sizes)
        if self.op == "matmul":
            return 2.0 * size["m"] * size["n"] * size["k"]
        if self.op == "bmm":
            return 2.0 * size["batch"] * size["m"] * size["n"] * size["k"]
        if self.op == "attention":
            # A query sees half of the keys on average (causal mask).
            pairs = size["batch"] * size["heads"] * size["queries"] * size["keys"] / 2
            return 2.0 * size["products"] * pairs * size["head_dim"]
        return 0.0

    @property
    def num_bytes(self) -> float:
        """Bytes read and written by one run (of a collective: the full tensor)."""
        size = dict(self.sizes)
        if self.op == "matmul":
            return HALF * float(size["m"] * size["k"] + size["k"] * size["n"] + size["m"] * size["n"])
        if self.op == "bmm":
            one = size["m"] * size["k"] + size["k"] * size["n"] + size["m"] * size["n"]
            return HALF * float(size["batch"] * one)
        if self.op == "attention":
            per_head = size["heads"] * size["queries"] * 2 + size["kv_heads"] * size["keys"] * 2
            return HALF * float(size["batch"] * per_head * size["head_dim"])
        return float(size["bytes"])


def layer_ops(shape: TransformerShape, setup: TrainingSetup, layer: int) -> tuple[CountedOp, ...]:
    """All ops of one layer for one microbatch, forward and backward, nothing recomputed.

    Raises TransformerError for a setup in which the model cannot be laid out.
    """
    check_layout(shape, setup)
    experts = None if shape.is_dense(layer) else shape.experts
    forward = [*_attention(shape, setup), *_feed_forward(shape, setup, experts), *_block_passes(shape, setup)]
    return (
        *forward,
        *(gradient for op in forward for gradient in _gradients(op)),
        *_collectives(shape, setup, experts),
    )


def head_ops(shape: TransformerShape, setup: TrainingSetup) -> tuple[CountedOp, ...]:
    """The last norm, the product with the vocabulary and the loss, forward and backward."""
    tokens, vocab = setup.tokens, -(-shape.vocab // setup.tp)
    forward = [
        _matmul("logits", tokens, vocab, shape.hidden),
        _norm("last norm", setup.local_tokens * shape.hidden),
        # Logits become single precision; largest, shift, exponential, sum and division each pass over them: 4, 8, 8, 4
        # and 8 bytes (Megatron-LM, vocabulary-parallel cross entropy). Backward scales in place and returns to 16 bits.
        _memory(
            "loss",
            (HALF + SINGLE + 8 * SINGLE) * tokens * vocab,
            gradient_bytes=(3 * SINGLE + HALF) * tokens * vocab,
        ),
    ]
    return (*forward, *(gradient for op in forward for gradient in _gradients(op)))


def embedding_ops(shape: TransformerShape, setup: TrainingSetup) -> tuple[CountedOp, ...]:
    """Rows of the table are read and written; backward adds their gradients."""
    moved = 2 * HALF * setup.tokens * shape.hidden
    forward = _memory("embedding", moved, gradient_bytes=2 * moved)
    return (forward, *_gradients(forward))


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
        _matmul("qkv", tokens, out + 2 * kv_heads * shape.head_dim, shape.hidden),
        _matmul("projection", tokens, shape.hidden, out),
        _memory("heads in order", 2 * HALF * tokens * out),
    ]
    if shape.max_positions == 0:
        ops.append(_memory("rotary", 2 * HALF * tokens * (out + kv_heads * shape.head_dim)))
    if setup.fused_attention:
        return [*ops, _fused(setup, heads, kv_heads, shape.head_dim, queries)]
    batch = setup.microbatch_size * heads
    scores = batch * queries * setup.seq
    # Dropout reads, writes, and has its mask.
    dropout = (2 * HALF + 1) * scores
    return [
        *ops,
        _bmm("scores", batch, queries, setup.seq, shape.head_dim),
        *_softmax(scores, fused=batch % _SOFTMAX_BATCHES == 0),
        *([_memory("attention dropout", dropout, gradient_bytes=dropout, in_core=True)] if shape.dropout else []),
        _bmm("values", batch, queries, shape.head_dim, setup.seq),
    ]


def _softmax(scores: int, *, fused: bool) -> list[CountedOp]:
    """Reads and writes the scores (backward: reads two, writes one), or as many kernels in single precision."""
    if fused:
        return [_memory("softmax", 2 * HALF * scores, gradient_bytes=3 * HALF * scores, in_core=True)]
    widened = (HALF + SINGLE) * scores
    whole = 2 * SINGLE * scores
    return [
        _memory("scores widened", widened, in_core=True),
        _memory("scores scaled", whole, in_core=True),
        _memory("mask", HALF // 2 * scores, in_core=True),
        _memory("scores masked", whole, in_core=True),
        _memory("softmax", whole, gradient_bytes=3 * SINGLE * scores, in_core=True),
        _memory("probabilities narrowed", widened, in_core=True),
    ]


def _latent_attention(shape: TransformerShape, latent: LatentAttention, setup: TrainingSetup) -> list[CountedOp]:
    tokens, heads = setup.tokens, shape.heads // setup.tp
    width = latent.content_dim + latent.rotary_dim
    return [
        _matmul("query down", tokens, latent.query_rank, shape.hidden),
        _matmul("query up", tokens, heads * width, latent.query_rank),
        _matmul("kv down", tokens, latent.kv_rank + latent.rotary_dim, shape.hidden),
        _matmul("kv up", tokens, heads * (latent.content_dim + latent.value_dim), latent.kv_rank),
        _matmul("projection", tokens, shape.hidden, heads * latent.value_dim),
        _memory("latent norms", 2 * HALF * tokens * (latent.query_rank + latent.kv_rank)),
        _memory("heads in order", 2 * HALF * tokens * heads * (2 * width + latent.value_dim)),
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
    routed = _gated_products(tokens, shape.hidden, max(experts.ffn // setup.tp, 1), gated=True)
    ops = [replace(op, count=float(local)) for op in routed]
    if experts.num_shared:
        width = max(experts.num_shared * experts.ffn // setup.tp, 1)
        ops += _gated_products(setup.tokens, shape.hidden, width, gated=True)
    ops.append(_matmul("router", setup.tokens, experts.num_experts, shape.hidden))
    # Tokens are put in the experts' order and back: read and written twice.
    ops.append(_memory("permute", 4 * HALF * setup.tokens * experts.top_k * shape.hidden))
    return ops


def _gated_products(tokens: int, hidden: int, ffn: int, gated: bool) -> list[CountedOp]:
    return [
        _matmul("up", tokens, 2 * ffn if gated else ffn, hidden),
        _memory(
            "activation",
            (3 if gated else 2) * HALF * tokens * ffn,
            gradient_bytes=(5 if gated else 3) * HALF * tokens * ffn,
        ),
        _matmul("down", tokens, hidden, ffn),
    ]


def _block_passes(shape: TransformerShape, setup: TrainingSetup) -> list[CountedOp]:
    elements = setup.local_tokens * shape.hidden
    dropout = elements if shape.dropout else 0
    # Backward adds the gradients of the two branches; dropout reads, masks and writes; each bias sums a gradient.
    branches = 3 * HALF * elements + (2 * HALF * elements + dropout if shape.dropout else 0)
    biases = HALF * elements if shape.biased else 0
    residual = _memory("residual", 3 * HALF * elements + dropout, gradient_bytes=branches + biases)
    return [replace(op, count=2.0) for op in (_norm("norm", elements), residual)]


def _norm(name: str, elements: int) -> CountedOp:
    # Backward reads input and gradient for the input's gradient, which it writes, and both again for the parameters'.
    return _memory(name, 2 * HALF * elements, gradient_bytes=5 * HALF * elements)


def _gradients(op: CountedOp) -> tuple[CountedOp, ...]:
    """The backward of one forward op."""
    size = dict(op.sizes)
    if op.op in ("matmul", "bmm"):
        m, n, k = size["m"], size["n"], size["k"]
        batch = (("batch", size["batch"]),) if op.op == "bmm" else ()
        to_input = replace(op, part="input_gradient", sizes=(*batch, ("m", m), ("n", k), ("k", n)), in_core=False)
        other = replace(to_input, sizes=(*batch, ("m", k), ("n", n), ("k", m)))
        return to_input, replace(other, part="weight_gradient" if op.weighted else "input_gradient")
    if op.op == "attention":
        sizes = tuple({**size, "products": _ATTENTION_BACKWARD_PRODUCTS}.items())
        return (replace(op, part="input_gradient", sizes=sizes, in_core=False),)
    moved = (("bytes", op.gradient_bytes or size["bytes"]),)
    return (replace(op, part="input_gradient", sizes=moved, in_core=False),)


def _collectives(shape: TransformerShape, setup: TrainingSetup, experts: Experts | None) -> list[CountedOp]:
    ops: list[CountedOp] = []
    whole = HALF * setup.tokens * shape.hidden
    # With experts laid out over the tensor group's devices too, their blocks talk as dense ones do.
    if setup.tp > 1 and setup.sequence_parallel:
        ops += [_collective(op, whole, "tensor", "forward") for op in ("all_gather", "reduce_scatter")]
        ops.append(_collective("all_gather", whole, "tensor", "input_gradient"))
        ops.append(_collective("all_gather", whole, "tensor", "input_gradient", hidden_by="input_gradient"))
        ops.append(_collective("reduce_scatter", whole, "tensor", "input_gradient", hidden_by="weight_gradient"))
    elif setup.tp > 1:
        ops.append(_collective("all_reduce", whole, "tensor", "forward"))
        ops.append(_collective("all_reduce", whole, "tensor", "input_gradient", hidden_by="weight_gradient"))
    ops = [replace(op, count=2.0) for op in ops]
    if setup.cp > 1:
        keys = HALF * setup.microbatch_size * setup.seq * 2 * shape.local_kv_heads(setup.tp) * shape.head_dim
        ops.append(_collective("all_gather", keys, "context", "forward", hidden_by="forward"))
        ops.append(_collective("all_gather", keys, "context", "input_gradient", hidden_by="input_gradient"))
        ops.append(_collective("reduce_scatter", keys, "context", "input_gradient", hidden_by="input_gradient"))
    if experts is not None and setup.ep > 1:
        routed = whole * experts.top_k * setup.ep
        ops += [replace(_collective("all_to_all", routed, "expert", "forward"), count=2.0)]
        ops += [replace(_collective("all_to_all", routed, "expert", "input_gradient"), count=2.0)]
    return ops


def _collective(op: Op, num_bytes: int, group: Group, part: Part, hidden_by: Part | None = None) -> CountedOp:
    sizes = (("bytes", num_bytes),)
    return CountedOp(name=f"{group} {op}", op=op, sizes=sizes, part=part, group=group, hidden_by=hidden_by)


def _matmul(name: str, m: int, n: int, k: int) -> CountedOp:
    return CountedOp(name=name, op="matmul", sizes=(("m", m), ("n", n), ("k", k)), weighted=True)


def _bmm(name: str, batch: int, m: int, n: int, k: int) -> CountedOp:
    return CountedOp(name=name, op="bmm", sizes=(("batch", batch), ("m", m), ("n", n), ("k", k)), in_core=True)


def _memory(name: str, num_bytes: int, *, gradient_bytes: int = 0, in_core: bool = False) -> CountedOp:
    sizes = (("bytes", num_bytes),)
    return CountedOp(name=name, op="memory", sizes=sizes, in_core=in_core, gradient_bytes=gradient_bytes)
