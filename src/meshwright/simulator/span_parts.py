"""The parts of a forward or a backward in order, and when they end if an asynchronous host issues them.

Parts are the host's own work at the start, the ops, and in the first backward of a step the filling of each bucket,
once all of its gradients are ready. Ops go from the first to the last, in a backward from the last to the first.

A host issues the parts one after the other, in h_j each, and the device runs them in the same order, in d_j each. A
part begins neither before it is issued nor before its predecessor has ended. Let D_j = Σ_{i<=j} d_i and
H_j = Σ_{i<=j} h_i. In a span that the device may begin at r and the host begins to issue at s, part j ends at

    max(r + D_j, s + E_j)         E_j = max_{i<=j} (H_i + D_j - D_{i-1})

by induction over j. All times are whole picoseconds: D_j and H_j are rounded sums. The span ends with its last part n:
it takes D_n on the device and H_n on the host, and ends at least E_n after the host began.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.simulator.alike import FIRST
from meshwright.simulator.stage_costs import OpSeconds
from meshwright.spec import Opcode
from meshwright.spec.units import PICOSECONDS_PER_SECOND

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]


class SpanParts(NamedTuple):
    """The k parts of a forward or a backward, in order.

    ``number`` (k,): the op's index in the stage, n (the number of ops) for the host's own work, or n + 1 + the bucket's
    index. ``done_s`` (k,) are the D_j, and ``issued_s`` (k,) the H_j of the host whose calls were measured, None
    without an asynchronous host; both in seconds. ``filled``: by bucket, the index of the part that completes it.
    """

    number: Ids
    done_s: Floats
    issued_s: Floats | None
    filled: dict[int, int]


class IssuedParts(NamedTuple):
    """The times of k parts in ps, shape (k,) each: D_j, H_j and E_j of the module's docstring."""

    done_ps: Ids
    issued_ps: Ids
    earliest_ps: Ids


def list_parts(seconds: OpSeconds, opcode: Opcode, place: int) -> SpanParts:
    """Return the parts of one computation, including those that take no time.

    ``place``: whether it is the first or last backward of its stage in a step (`place_of_backward`).
    """
    count, issue, row = len(seconds.forward), seconds.issue, _row(opcode)
    order = slice(None) if opcode is Opcode.FORWARD else slice(None, None, -1)
    fills = seconds.fill_s if place & FIRST else {}
    filled, latest = {}, 0
    for earlier, bucket in enumerate(sorted(seconds.fill_s)):
        # Buckets are sent in order: none is ready before the one ahead of it.
        latest = max(latest, count - seconds.first_uses[bucket] if bucket in seconds.first_uses else 0)
        filled[bucket] = latest + (1 + earlier if fills else 0)
    is_op = np.ones(1 + count + len(fills), np.bool_)
    is_op[[0, *(filled[bucket] for bucket in fills)]] = False
    number = np.full(len(is_op), count)
    op_s, fill_s = np.zeros((2, len(is_op)))
    number[is_op], op_s[is_op] = np.arange(count)[order], _taken(seconds, opcode, place)[order]
    for bucket in fills:
        number[filled[bucket]], fill_s[filled[bucket]] = count + 1 + bucket, fills[bucket]
    done_s = seconds.host_s[row] + np.cumsum(op_s)
    if fills:
        done_s += np.cumsum(fill_s)
    if issue is None:
        return SpanParts(number, done_s, None, filled)
    calls = np.empty(len(is_op))
    calls[0], calls[is_op] = issue.instruction_s[row], _issued(seconds, opcode, place)[order]
    for bucket in fills:
        calls[filled[bucket]] = issue.fill_s[bucket]
    return SpanParts(number, done_s, np.cumsum(calls), filled)


def issue_parts(parts: SpanParts, duration_ps: int, factor: float) -> IssuedParts:
    """Return the parts of a span of ``duration_ps`` on the device, for a host ``factor`` times as slow as measured."""
    done_ps = span_ps(parts.done_s, duration_ps)
    assert parts.issued_s is not None, "no host issues what takes no host time"
    issued_ps = np.rint(parts.issued_s * (factor * PICOSECONDS_PER_SECOND)).astype(np.int64)
    before_ps = np.concatenate([[0], done_ps[:-1]])
    return IssuedParts(done_ps, issued_ps, np.maximum.accumulate(issued_ps - before_ps) + done_ps)


def span_ps(done_s: Floats, duration_ps: int) -> Ids:
    """Return when each part ends, in ps after the start of the span; the last part ends with the span."""
    done_ps = np.minimum(np.rint(done_s * PICOSECONDS_PER_SECOND).astype(np.int64), duration_ps)
    done_ps[-1:] = duration_ps
    return done_ps


def _row(opcode: Opcode) -> int:
    return 0 if opcode is Opcode.FORWARD else 2 if opcode is Opcode.BACKWARD_WEIGHT else 1


def _taken(seconds: OpSeconds, opcode: Opcode, place: int) -> Floats:
    """Return the seconds of the ops on the device."""
    return _of_pass(seconds.forward, seconds.backward, seconds.weights, seconds.accumulate, opcode, place)


def _issued(seconds: OpSeconds, opcode: Opcode, place: int) -> Floats:
    """Return the seconds of the ops on the host."""
    assert seconds.issue is not None
    forward, backward, weights, accumulate = seconds.issue[:4]
    return _of_pass(forward, backward, weights, accumulate, opcode, place)


def _of_pass(
    forward: Floats, backward: Floats, weights: Floats, accumulate: Floats, opcode: Opcode, place: int
) -> Floats:
    if opcode is Opcode.FORWARD:
        return forward
    if opcode is Opcode.BACKWARD_INPUT:
        return backward - weights
    taken = weights if opcode is Opcode.BACKWARD_WEIGHT else backward
    return taken if place & FIRST else taken + accumulate
