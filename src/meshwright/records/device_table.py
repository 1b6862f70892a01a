"""Rows of a table of a device: single operators, each alone on tensors of many sizes, whatever model has them.

    products of matrices    matmul, sizes m, n, k; ``kernel`` says which of a layer's three it is (``aten.mm``,
                            ``aten.mm.dgrad``, ``aten.mm.wgrad``): their factors lie differently in memory
    other operators         ``aten.NAME``, the inputs that decide its traffic in the form of a captured op; ``kernel``:
                            of many products at once ``nn``, or ``nt`` where the second factors are transposed

Where they coincide, these are the rows of a trace of torch's profiler (`importing.trace`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.records.table import named_shapes, parse_sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.records.table import Row

    Shapes = Sequence[Sequence[int]]

PRODUCTS = ("aten.mm", "aten.mm.dgrad", "aten.mm.wgrad")
# Operators whose inputs of one dim are places in a table, or classes.
_INDEXED = ("aten.embedding", "aten.embedding_dense_backward", "aten.nll_loss_forward", "aten.nll_loss_backward")


def device_row(op: str, dtype: str, shapes: Shapes, kernel: str = "") -> Row:
    """The columns ``op``, ``phase``, ``shapes``, ``dtype`` and ``kernel`` of an operator on inputs of these shapes."""
    if op in PRODUCTS:
        (m, k), (_, n) = shapes
        return {"op": "matmul", "phase": "", "shapes": named_shapes(m=m, n=n, k=k), "dtype": dtype, "kernel": op}
    inputs = (f"{'x'.join(map(str, shape))}:{_dtype(op, dtype, shape)}" for shape in shapes)
    return {"op": op, "phase": "forward", "shapes": f"{','.join(inputs)}|", "dtype": dtype, "kernel": kernel}


def read_device_row(op: str, shapes: str, kernel: str) -> tuple[str, tuple[tuple[int, ...], ...]] | None:
    """(operator, shapes of its inputs) of a row that `device_row` made; None for every other row."""
    if op == "matmul" and kernel in PRODUCTS:
        sizes = parse_sizes(shapes) or {}
        if sizes.keys() != {"m", "n", "k"}:
            return None
        return kernel, ((sizes["m"], sizes["k"]), (sizes["k"], sizes["n"]))
    if not shapes.endswith("|") or ":" not in shapes:
        return None
    sides = (text.partition(":")[0] for text in shapes[:-1].partition(";")[0].split(","))
    return op, tuple(tuple(int(size) for size in text.split("x") if size) for text in sides)


def _dtype(op: str, dtype: str, shape: Sequence[int]) -> str:
    return "int64" if op in _INDEXED and len(shape) == 1 else dtype
