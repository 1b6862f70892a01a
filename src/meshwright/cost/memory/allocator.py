"""Memory that torch's caching allocator on CUDA reserves from the driver for a sequence of allocations.

    rounded(n)    n rounded up to a multiple of 512 bytes, at least 512
    segment(n)    2 MiB for n ≤ 1 MiB (the small pool); 20 MiB for n < 10 MiB; else n rounded up to a multiple of 2 MiB
    allocate(n)   take the smallest free block of the pool with at least n bytes, else a new segment; split off the rest
                  as a free block if it is at least 512 bytes (small pool) or more than 1 MiB (large pool)
    free          merge the block with its free neighbours in the segment; segments are never returned

"Allocated" counts whole blocks, as `torch.cuda.max_memory_allocated` does; "reserved" counts all segments. Source:
torch, c10/cuda/CUDACachingAllocator.cpp with its defaults (no expandable segments): kMinBlockSize, kSmallSize,
kSmallBuffer, kLargeBuffer, kMinLargeAlloc, kRoundLarge, get_free_block, should_split. The CPU's allocator caches
nothing and aligns to 64 bytes (c10/core/alignment.h).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled

if TYPE_CHECKING:
    from meshwright.cost.memory.ledger import MemoryEvents

_MIB = 2**20
MIN_BLOCK_BYTES = 512
SMALL_BYTES = _MIB
SMALL_SEGMENT_BYTES = 2 * _MIB
LARGE_SEGMENT_BYTES = 20 * _MIB
MIN_LARGE_BYTES = 10 * _MIB
ROUND_LARGE_BYTES = 2 * _MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeaks:
    """Peak memory of a device: bytes of allocated blocks, and bytes of the segments that the allocator reserved."""

    allocated_bytes: int
    reserved_bytes: int


def follow_allocator(events: MemoryEvents) -> DevicePeaks:
    """Return the peaks of a sequence of allocations and frees, which starts with an empty allocator."""
    num_blocks = int(events.block.max(initial=-1)) + 1
    allocated, reserved = _follow(events.block, events.num_bytes, num_blocks)
    return DevicePeaks(allocated_bytes=int(allocated), reserved_bytes=int(reserved))


class _Memory(NamedTuple):
    """Pieces of segments as columns, shape (pieces,), and the free ones of the large and the small pool.

    ``before`` and ``after`` are a piece's neighbours in its segment, -1 at the ends; ``pool`` is 1 for the small pool.
    ``free`` (2, pieces) has the ``num_free`` (2,) free pieces of each pool in the order of size and address.
    """

    size: NDArray[np.int64]
    address: NDArray[np.int64]
    before: NDArray[np.int64]
    after: NDArray[np.int64]
    pool: NDArray[np.int64]
    is_free: NDArray[np.bool_]
    free: NDArray[np.int64]
    num_free: NDArray[np.int64]


@compiled
def _follow(block: NDArray[np.int64], num_bytes: NDArray[np.int64], num_blocks: int) -> tuple[int, int]:
    """Return the most bytes that were allocated at once, and the bytes reserved at the end."""
    # An allocation makes at most two pieces.
    room = 2 * int((num_bytes > 0).sum()) + 1
    memory = _Memory(
        np.zeros(room, np.int64),
        np.zeros(room, np.int64),
        np.full(room, -1, np.int64),
        np.full(room, -1, np.int64),
        np.zeros(room, np.int64),
        np.zeros(room, np.bool_),
        np.zeros((2, room), np.int64),
        np.zeros(2, np.int64),
    )
    # The piece of each block in use; an empty tensor has none.
    piece_of = np.full(num_blocks, -1, np.int64)
    made, reserved, allocated, most = 0, 0, 0, 0
    for event in range(len(block)):
        wanted, piece = num_bytes[event], piece_of[block[event]]
        if piece >= 0:
            allocated -= memory.size[piece]
            _give_back(memory, piece)
            piece_of[block[event]] = -1
        elif wanted > 0:
            size = -(-wanted // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
            small = size <= SMALL_BYTES
            pool = 1 if small else 0
            place = _place(memory, pool, size, 0)
            if place < memory.num_free[pool]:
                piece = memory.free[pool, place]
                _leave_pool(memory, pool, place)
            else:
                piece, made = made, made + 1
                segment = _segment_bytes(size, small)
                memory.size[piece], memory.address[piece], memory.pool[piece] = segment, reserved, pool
                reserved += segment
            rest = memory.size[piece] - size
            if rest >= MIN_BLOCK_BYTES if small else rest > SMALL_BYTES:
                other, made = made, made + 1
                memory.size[piece], memory.size[other] = size, rest
                memory.address[other], memory.pool[other] = memory.address[piece] + size, pool
                memory.before[other], memory.after[other] = piece, memory.after[piece]
                if memory.after[other] >= 0:
                    memory.before[memory.after[other]] = other
                memory.after[piece] = other
                _join_pool(memory, other)
            allocated += memory.size[piece]
            most = max(most, allocated)
            piece_of[block[event]] = piece
    return most, reserved


@compiled
def _segment_bytes(size: int, small: bool) -> int:
    """Return the size of a new segment for a block that no free piece can hold."""
    if small:
        return SMALL_SEGMENT_BYTES
    if size < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


@compiled
def _give_back(memory: _Memory, piece: int) -> None:
    """Free a piece, joined with its free neighbours."""
    before, after = memory.before[piece], memory.after[piece]
    if after >= 0 and memory.is_free[after]:
        _merge(memory, piece, after, after)
    if before >= 0 and memory.is_free[before]:
        _merge(memory, before, piece, before)
        piece = before
    _join_pool(memory, piece)


@compiled
def _merge(memory: _Memory, first: int, second: int, free: int) -> None:
    """Merge two neighbours; ``free``, one of them, leaves the pool."""
    _leave_pool(memory, memory.pool[free], _place(memory, memory.pool[free], memory.size[free], memory.address[free]))
    memory.size[first] += memory.size[second]
    memory.after[first] = memory.after[second]
    if memory.after[second] >= 0:
        memory.before[memory.after[second]] = first


@compiled
def _place(memory: _Memory, pool: int, size: int, address: int) -> int:
    """Return the place in a pool of the first piece that is not before (size, address)."""
    low, high = 0, memory.num_free[pool]
    while low < high:
        middle = (low + high) // 2
        piece = memory.free[pool, middle]
        if memory.size[piece] < size or (memory.size[piece] == size and memory.address[piece] < address):
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _join_pool(memory: _Memory, piece: int) -> None:
    pool = memory.pool[piece]
    place, count = _place(memory, pool, memory.size[piece], memory.address[piece]), memory.num_free[pool]
    for i in range(count, place, -1):
        memory.free[pool, i] = memory.free[pool, i - 1]
    memory.free[pool, place] = piece
    memory.num_free[pool] = count + 1
    memory.is_free[piece] = True


@compiled
def _leave_pool(memory: _Memory, pool: int, place: int) -> None:
    memory.is_free[memory.free[pool, place]] = False
    for i in range(place, memory.num_free[pool] - 1):
        memory.free[pool, i] = memory.free[pool, i + 1]
    memory.num_free[pool] -= 1
