"""Encode long columns of whole numbers for a page: base64 of variable-length integers, usually deflated.

    v_i   the numbers; with ``delta``, v_i - v_(i-1) (v_(-1) = 0)
    z_i   zigzag: 2·v for v ≥ 0, −2·v − 1 for v < 0
    bytes LEB128: seven bits a byte, the low ones first, the top bit set in all but the last (DWARF 5, 7.6)

Deflated columns are zlib streams (RFC 1950), which browsers inflate without a library (``DecompressionStream``).
``columns.js`` reads what this module writes; numbers are exact up to 2^53.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

# For shorter columns, reading through a stream costs more than deflating saves.
_MIN_DEFLATED_BYTES = 512
# 64 bits in groups of seven.
_MAX_BYTES_PER_NUMBER = 10


def pack_column(values: NDArray[Any], *, delta: bool = False, deflate: bool = True) -> dict[str, Any]:
    """Return a column as JSON: ``count``, ``delta``, ``deflate`` and ``data`` (base64).

    Args:
        values: Whole numbers, shape (count,).
        delta: Store differences between neighbours.
        deflate: Deflate if that saves bytes; without it, packing and reading take less time and more bytes.
    """
    numbers = values.astype(np.int64)
    if delta:
        numbers = np.diff(numbers, prepend=0)
    data = _to_bytes(((numbers << 1) ^ (numbers >> 63)).view(np.uint64))
    deflated = deflate and len(data) >= _MIN_DEFLATED_BYTES
    return {
        "count": len(numbers),
        "delta": delta,
        "deflate": deflated,
        "data": base64.b64encode(zlib.compress(data, 9) if deflated else data).decode("ascii"),
    }


def _to_bytes(numbers: NDArray[np.uint64]) -> bytes:
    """LEB128 of all numbers, concatenated."""
    lengths = np.ones(len(numbers), np.int64)
    for place in range(1, _MAX_BYTES_PER_NUMBER):
        lengths += numbers >= np.uint64(1 << 7 * place)
    ends = np.cumsum(lengths)
    buffer = np.zeros(int(ends[-1]) if len(ends) else 0, np.uint8)
    for place in range(int(lengths.max(initial=0))):
        has = lengths > place
        group = (numbers[has] >> np.uint64(7 * place)).astype(np.uint8) & 0x7F
        more = (lengths[has] > place + 1).astype(np.uint8) << 7
        buffer[(ends - lengths)[has] + place] = group | more
    return buffer.tobytes()
