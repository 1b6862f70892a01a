"""What torch's caching allocator on CUDA reserves from the driver for a sequence of allocations.

    rounded(n)    n up to a multiple of 512 bytes, at least 512
    segment(n)    2 MiB for n ≤ 1 MiB (the small pool); 20 MiB below 10 MiB; else n up to a multiple of 2 MiB
    allocate(n)   the smallest free block of the pool that holds n, else a new segment; what is left over becomes a free
                  block where it is at least 512 bytes (small pool) or more than 1 MiB (large pool), and else stays
    free          the block joins its free neighbours in the segment; segments are never given back

"Allocated" counts whole blocks, as `torch.cuda.max_memory_allocated` does, "reserved" all segments. Source: torch,
c10/cuda/CUDACachingAllocator.cpp with its defaults (no expandable segments): kMinBlockSize, kSmallSize, kSmallBuffer,
kLargeBuffer, kMinLargeAlloc, kRoundLarge, get_free_block, should_split. CPUs' allocator caches nothing and aligns to 64
bytes (c10/core/alignment.h).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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
    """Largest bytes that tensors held, in whole blocks, and that the allocator held for them."""

    allocated_bytes: int
    reserved_bytes: int


def follow_allocator(events: MemoryEvents) -> DevicePeaks:
    """Run a sequence of events through an empty allocator."""
    allocator = CachingAllocator()
    live: dict[int, int | None] = {}
    allocated = 0
    for block, num_bytes in zip(events.block.tolist(), events.num_bytes.tolist(), strict=True):
        if block in live:
            address = live.pop(block)
            if address is not None:
                allocator.free(address)
        else:
            # Nothing is allocated for an empty tensor.
            live[block] = allocator.allocate(num_bytes) if num_bytes else None
            allocated = max(allocated, allocator.allocated_bytes)
    return DevicePeaks(allocated_bytes=allocated, reserved_bytes=allocator.reserved_bytes)


@dataclass(slots=True)
class _Block:
    size: int
    is_small: bool
    is_free: bool = False
    before: int | None = None
    after: int | None = None


@dataclass(slots=True)
class CachingAllocator:
    """Addresses are numbers; segments never touch."""

    allocated_bytes: int = 0
    reserved_bytes: int = 0
    _blocks: dict[int, _Block] = field(default_factory=dict)
    # Of the large and the small pool: free blocks as (size, address), sorted.
    _free: tuple[list[tuple[int, int]], list[tuple[int, int]]] = field(default_factory=lambda: ([], []))

    def allocate(self, num_bytes: int) -> int:
        """Address of a block for ``num_bytes``, which is at least 1."""
        size = -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        is_small = size <= SMALL_BYTES
        pool = self._free[is_small]
        place = bisect_left(pool, (size, 0))
        address = pool.pop(place)[1] if place < len(pool) else self._add_segment(size, is_small=is_small)
        block = self._blocks[address]
        block.is_free = False
        rest = block.size - size
        if rest >= MIN_BLOCK_BYTES if is_small else rest > SMALL_BYTES:
            self._split(address, size)
        self.allocated_bytes += block.size
        return address

    def free(self, address: int) -> None:
        """Give a block back, joined with its free neighbours."""
        block = self._blocks[address]
        self.allocated_bytes -= block.size
        if block.after is not None and self._blocks[block.after].is_free:
            self._join(address, block.after)
        if block.before is not None and self._blocks[block.before].is_free:
            address, joined = block.before, address
            self._join(address, joined)
        block = self._blocks[address]
        block.is_free = True
        insort(self._free[block.is_small], (block.size, address))

    def _add_segment(self, size: int, *, is_small: bool) -> int:
        if is_small:
            size = SMALL_SEGMENT_BYTES
        elif size < MIN_LARGE_BYTES:
            size = LARGE_SEGMENT_BYTES
        else:
            size = -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
        address, self.reserved_bytes = self.reserved_bytes, self.reserved_bytes + size
        self._blocks[address] = _Block(size, is_small)
        return address

    def _split(self, address: int, size: int) -> None:
        block = self._blocks[address]
        rest = address + size
        self._blocks[rest] = _Block(block.size - size, block.is_small, is_free=True, before=address, after=block.after)
        if block.after is not None:
            self._blocks[block.after].before = rest
        block.size, block.after = size, rest
        insort(self._free[block.is_small], (self._blocks[rest].size, rest))

    def _join(self, first: int, second: int) -> None:
        """Make two neighbours one; those of them that are free leave the pool."""
        left, right = self._blocks[first], self._blocks.pop(second)
        for block, address in ((left, first), (right, second)):
            if block.is_free:
                pool = self._free[block.is_small]
                pool.pop(bisect_left(pool, (block.size, address)))
                block.is_free = False
        left.size += right.size
        left.after = right.after
        if right.after is not None:
            self._blocks[right.after].before = first
