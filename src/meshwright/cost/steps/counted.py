"""What a counted op is, its backward, and how the kinds of ops are written down.

FLOPs and bytes follow from the sizes; a predictor of ops needs nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from meshwright.cost.transformer import HALF

Op = Literal["matmul", "bmm", "attention", "memory", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
Part = Literal["forward", "input_gradient", "weight_gradient"]
Group = Literal["", "tensor", "context", "expert", "data"]

# Matrix products of attention's backward without stored scores: scores again, and gradients of values, probabilities,
# queries and keys (Dao, FlashAttention-2, 2023, section 3.1).
_ATTENTION_BACKWARD_PRODUCTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedOp:
    """One op of a layer, run ``count`` times per microbatch.

    ``sizes``: matmul m, n, k; bmm batch, m, n, k; attention batch, heads, kv_heads, head_dim, queries, keys, products
    (2 forward, 5 backward); memory bytes; collectives bytes (the full tensor). ``group``: whose ranks talk.
    ``in_core``: attention's core, which selective recompute runs again. ``weighted``: a product with a parameter.
    ``first``: a product whose first factor has no gradient.
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
    first: bool = False
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


def gradient_ops(op: CountedOp) -> tuple[CountedOp, ...]:
    """The backward of one forward op."""
    size = dict(op.sizes)
    if op.op in ("matmul", "bmm"):
        m, n, k = size["m"], size["n"], size["k"]
        batch = (("batch", size["batch"]),) if op.op == "bmm" else ()
        to_input = replace(op, part="input_gradient", sizes=(*batch, ("m", m), ("n", k), ("k", n)), in_core=False)
        other = replace(to_input, sizes=(*batch, ("m", k), ("n", n), ("k", m)))
        other = replace(other, part="weight_gradient" if op.weighted else "input_gradient")
        return (other,) if op.first else (to_input, other)
    if op.op == "attention":
        sizes = tuple({**size, "products": _ATTENTION_BACKWARD_PRODUCTS}.items())
        return (replace(op, part="input_gradient", sizes=sizes, in_core=False),)
    moved = (("bytes", op.gradient_bytes or size["bytes"]),)
    return (replace(op, part="input_gradient", sizes=moved, in_core=False),)


def norm_op(name: str, elements: int) -> CountedOp:
    """A norm over so many elements, forward."""
    # Backward reads input and gradient for the input's gradient, which it writes, and both again for the parameters'.
    return memory_op(name, 2 * HALF * elements, gradient_bytes=5 * HALF * elements)


def collective_op(op: Op, num_bytes: int, group: Group, part: Part, hidden_by: Part | None = None) -> CountedOp:
    """A collective over a full tensor of so many bytes."""
    sizes = (("bytes", num_bytes),)
    return CountedOp(name=f"{group} {op}", op=op, sizes=sizes, part=part, group=group, hidden_by=hidden_by)


def matmul_op(name: str, m: int, n: int, k: int) -> CountedOp:
    """A product with a parameter."""
    return CountedOp(name=name, op="matmul", sizes=(("m", m), ("n", n), ("k", k)), weighted=True)


def bmm_op(name: str, batch: int, m: int, n: int, k: int) -> CountedOp:
    """Products of activations with each other, in attention's core."""
    return CountedOp(name=name, op="bmm", sizes=(("batch", batch), ("m", m), ("n", n), ("k", k)), in_core=True)


def memory_op(name: str, num_bytes: int, *, gradient_bytes: int = 0, in_core: bool = False) -> CountedOp:
    """A pass that reads and writes so many bytes, backward ``gradient_bytes`` or as many."""
    sizes = (("bytes", num_bytes),)
    return CountedOp(name=name, op="memory", sizes=sizes, in_core=in_core, gradient_bytes=gradient_bytes)
