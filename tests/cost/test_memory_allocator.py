"""torch's caching allocator: its sizes by hand, and against a slow one that looks through all of its memory."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.memory import MemoryEvents, find_peak, follow_allocator, trace_step
from meshwright.spec import Optimizer, Workload, load_shipped_graph
from tests.marks import examples

KIB, MIB = 2**10, 2**20


def follow(*events):
    """Allocated at most, and reserved, after events (block, bytes; negative where it is freed)."""
    block, num_bytes = np.array(events, np.int64).T
    part = np.zeros_like(block)
    found = follow_allocator(
        MemoryEvents(block=block.copy(), num_bytes=num_bytes.copy(), part=part, moment=part, moments=("start",))
    )
    return found.allocated_bytes, found.reserved_bytes


def test_segments_by_size():
    # Sizes and segments as in the source's comments: 1 byte, 1 MiB, just above, 10 MiB, 11 MiB + 1.
    for size, block, segment in [
        (1, 512, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB, 12 * MIB),
    ]:
        # A rest of at most 1 MiB stays with a large block.
        assert follow((0, size)) == (block, segment)


def test_a_freed_block_is_used_again_and_a_larger_one_is_not():
    events = [(0, 30 * MIB), (0, -30 * MIB), (1, 25 * MIB)]
    assert follow(*events) == (30 * MIB, 30 * MIB)
    events += [(1, -25 * MIB), (2, 30 * MIB)]
    assert follow(*events) == (30 * MIB, 30 * MIB)
    assert follow(*events, (3, 31 * MIB)) == (62 * MIB, 62 * MIB)


def test_a_number_may_stand_for_one_block_after_another():
    sizes = [count * MIB for count in range(1, 41)]
    events = [(0, sign * size) for size in sizes for sign in (1, -1)]
    # Of a different segment each, but for those that fit into the 20 MiB of the first one.
    assert follow(*events)[0] == 40 * MIB


class SlowAllocator:
    """The same rules over a list of segments, each a list of [size, name or None], searched from end to end."""

    def __init__(self):
        self.segments = []

    def allocate(self, name, num_bytes):
        size = max(512, -(-num_bytes // 512) * 512)
        small = size <= MIB
        found = [
            (piece[0], number, place)
            for number, (is_small, pieces) in enumerate(self.segments)
            for place, piece in enumerate(pieces)
            if is_small == small and piece[1] is None and piece[0] >= size
        ]
        if found:
            _, number, place = min(found)
        else:
            whole = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            self.segments.append((small, [[whole, None]]))
            number, place = len(self.segments) - 1, 0
        pieces = self.segments[number][1]
        rest = pieces[place][0] - size
        if (rest >= 512) if small else (rest > MIB):
            pieces[place : place + 1] = [[size, name], [rest, None]]
        else:
            pieces[place][1] = name

    def free(self, name):
        for _, pieces in self.segments:
            for piece in pieces:
                if piece[1] == name:
                    piece[1] = None
            place = 0
            while place + 1 < len(pieces):
                if pieces[place][1] is None and pieces[place + 1][1] is None:
                    pieces[place][0] += pieces.pop(place + 1)[0]
                else:
                    place += 1

    def totals(self):
        pieces = [piece for _, pieces in self.segments for piece in pieces]
        return sum(size for size, name in pieces if name is not None), sum(size for size, _ in pieces)


SIZES = st.one_of(st.integers(1, 4 * KIB), st.integers(1, 3 * MIB), st.integers(MIB, 40 * MIB))


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 10**6)), max_size=120))
def test_it_does_what_the_slow_one_does(choices):
    slow, live, events, most = SlowAllocator(), {}, [], 0
    for number, (frees, size, pick) in enumerate(choices):
        if frees and live:
            name = sorted(live)[pick % len(live)]
            events.append((name, -live.pop(name)))
            slow.free(name)
        else:
            live[number] = size
            events.append((number, size))
            slow.allocate(number, size)
        allocated, reserved = slow.totals()
        most = max(most, allocated)
        assert follow(*events) == (most, reserved)


def test_a_step_reserves_at_least_what_it_allocates():
    graph = load_shipped_graph("gpt2-small")
    events = trace_step(graph, Workload(global_batch=2, optimizer=Optimizer(kind="adamw")), device="cuda")
    peak, peaks = find_peak(events).num_bytes, follow_allocator(events)
    assert peak <= peaks.allocated_bytes <= peaks.reserved_bytes
    # Rounding costs little where tensors are large.
    assert peaks.allocated_bytes < 1.02 * peak
    assert peaks.reserved_bytes < 1.25 * peak
    assert np.all(events.in_use() >= 0)
