"""W3C Trace Context: what is valid, what the server answers, and what it does with tracestate."""

import re

import pytest

from meshwright.serving.server.trace_context import read_context, read_state

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"

WRONG = (
    *("a", "a=", "=1", "A=1", "0a=1", "a=1,a=2", "a=b=c", "a=\x7f", "a=é", "a@=1", "@a=1", "a=1,B"),
    *("a=" + "x" * 257, "a" * 257 + "=1", ",".join(f"k{place}=v" for place in range(33))),
)


@pytest.mark.parametrize(
    ("flags", "told"), [("00", "00"), ("01", "01"), ("02", "02"), ("03", "03"), ("ff", "03"), ("fc", "00")]
)
def test_a_trace_goes_on_in_a_span_of_its_own(flags, told):
    found = [read_context(f"00-{TRACE}-{PARENT}-{flags}".encode()) for _ in range(50)]
    spans = {context.span for context in found}
    assert len(spans) == 50
    assert all(re.fullmatch(rb"(?!0{16})[0-9a-f]{16}", span) for span in spans)
    assert PARENT.encode() not in spans
    for context in found:
        assert (context.trace, context.parent) == (TRACE.encode(), PARENT.encode())
        assert context.response == b"00-%b-%b-%b" % (context.trace, context.span, told.encode())


@pytest.mark.parametrize(
    "value",
    [
        "",
        "nonsense",
        f"00-{TRACE}-{PARENT}",
        f"00-{TRACE}-{PARENT}-1",
        f"00-{TRACE}-{PARENT}-001",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{TRACE}-{PARENT}-01-",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE}-{PARENT.upper()}-0A",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{PARENT}-01",
        f"cc-{TRACE}-{PARENT}-01more",
        f"00-{TRACE}-{PARENT}-01, 00-{TRACE}-{PARENT}-01",
        f"00_{TRACE}_{PARENT}_01",
    ],
)
def test_what_is_not_valid_is_ignored(value):
    assert read_context(value.encode()) is None


@pytest.mark.parametrize("more", ["", "-", "-what-the-future-has"])
def test_a_higher_version_is_read_as_far_as_it_is_known(more):
    assert read_context(f"cc-{TRACE}-{PARENT}-01{more}".encode()).response.startswith(b"00-4bf9")


@pytest.mark.parametrize(
    ("state", "members"),
    [
        ("", {}),
        ("rojo=00f067aa0ba902b7,congo=t61rcWkgMzE", {"rojo": "00f067aa0ba902b7", "congo": "t61rcWkgMzE"}),
        (" a=1 ,\tb=2, ,c=x y", {"a": "1", "b": "2", "c": "x y"}),
        ("fw529a3039@dt=FfffffB,0a@b*-_/=!", {"fw529a3039@dt": "FfffffB", "0a@b*-_/": "!"}),
        ("a=" + "x" * 256, {"a": "x" * 256}),
        (",".join(f"k{place}=v" for place in range(32)), {f"k{place}": "v" for place in range(32)}),
        *[(wrong, {}) for wrong in WRONG],
        ("a=1;b", {"a": "1;b"}),
    ],
)
def test_states_are_read_as_a_whole_or_not_at_all(state, members):
    found = read_state(state)
    assert found == members
    assert list(found) == list(members)
