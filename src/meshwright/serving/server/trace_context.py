"""W3C Trace Context: the trace that a request belongs to, and the server's own span in it.

    traceparent     of a request: 00-TRACE-PARENT-FLAGS (W3C Trace Context, Level 2, section 3.2). In a higher version,
                    only the part in the format of version 00 is used; an invalid value is ignored together with
                    ``tracestate``
    tracestate      of a request: data of tracing systems for the services that a server calls (section 3.3). This
                    server calls none, so it is not sent; a timeline shows it, unless it is invalid
    traceresponse   of an answer: 00-TRACE-SPAN-FLAGS, with the span that the server has given the request (W3C's draft
                    "Trace Context HTTP Response Headers Format")

The defined flags, sampled and random-trace-id, are returned as received; all others are zero.
"""

from __future__ import annotations

import random
import re

_PARENT = re.compile(rb"(?!ff)([0-9a-f]{2})-((?!0{32})[0-9a-f]{32})-((?!0{16})[0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
SAMPLED, _RANDOM = 1, 2
# tracestate: a name, with or without a tenant before it, and printable ASCII without comma and equals sign.
_KEY = r"(?:[a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
_MEMBER = re.compile(rf"({_KEY})=([ -+\--<>-~]{{0,255}}[!-+\--<>-~])")
_MOST_MEMBERS = 32
# Spans only have to differ; the system's source of randomness would need a system call each.
_draw_bits = random.Random().getrandbits


class TraceContext:
    """The trace of a request, its ``parent`` span, and the server's own ``span`` in it, as hexadecimal digits."""

    __slots__ = ("flags", "parent", "span", "state", "trace")

    def __init__(self, trace: bytes, parent: bytes, flags: int, state: bytes) -> None:
        self.trace, self.parent, self.flags, self.state = trace, parent, flags, state
        self.span = b"%016x" % (_draw_bits(64) or 1)

    @property
    def response(self) -> bytes:
        """The value of the header ``traceresponse``."""
        return b"00-%b-%b-%02x" % (self.trace, self.span, self.flags)


def read_context(parent: bytes, state: bytes = b"") -> TraceContext | None:
    """Parse a request's ``traceparent`` and ``tracestate``; return None if the first one is invalid."""
    found = _PARENT.fullmatch(parent)
    if found is None or (found[1] == b"00" and found[5]):
        return None
    return TraceContext(found[2], found[3], int(found[4], 16) & (SAMPLED | _RANDOM), state)


def read_state(state: str) -> dict[str, str]:
    """Return the members of a ``tracestate``, in order; an empty dict if any member is invalid."""
    members = [member for each in state.split(",") if (member := each.strip(" \t"))]
    pairs = [_MEMBER.fullmatch(member) for member in members]
    found = {pair[1]: pair[2] for pair in pairs if pair is not None}
    return found if len(found) == len(members) <= _MOST_MEMBERS else {}
