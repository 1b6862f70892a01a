"""Strangers' pickles: plain data comes through, everything else is refused and nothing is run."""

import collections
import fractions
import operator
import os
import pickle
import struct
import sys
import time
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.records.importing import alpa as pickled
from meshwright.records.importing.alpa import Pairs, PickledObject, load_pickle
from meshwright.spec import DocumentError

CLASS = "some.tool.Result"


class Result:
    """Stands in for the class of the tool; its module is made up."""

    __module__ = "some.tool"
    __qualname__ = "Result"


@pytest.fixture
def tool(monkeypatch):
    """The module in which pickle looks for the class while it writes."""
    module = types.ModuleType("some.tool")
    module.Result = Result
    monkeypatch.setitem(sys.modules, "some", types.ModuleType("some"))
    monkeypatch.setitem(sys.modules, "some.tool", module)


def plain(value):
    """Mappings as dicts again, for data that is known to be harmless."""
    match value:
        case Pairs():
            return {plain(key): plain(item) for key, item in value.items}
        case list():
            return [plain(item) for item in value]
        case tuple():
            return tuple(plain(item) for item in value)
    return value


scalars = st.none() | st.booleans() | st.integers(-(2**100), 2**100) | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner, max_size=5)
    ),
    max_leaves=20,
)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@given(value=values)
def test_plain_data_comes_through(protocol, value):
    assert plain(load_pickle(pickle.dumps(value, protocol), ())) == value


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_named_class_its_attributes_and_numpy_numbers(tool, protocol):
    result = Result()
    result.costs = collections.defaultdict(list, {("f32", 4): [(1, np.float64(2.5)), (2, np.int64(-7))]})
    content = pickle.dumps({"mesh": result}, protocol)
    ((key, found),) = load_pickle(content, {CLASS}).items
    assert key == "mesh"
    assert isinstance(found, PickledObject)
    assert found.name == CLASS
    assert plain(found.state) == {"costs": {("f32", 4): [(1, 2.5), (2, -7)]}}
    with pytest.raises(DocumentError, match=r"refers to 'some\.tool\.Result', which is not plain data"):
        load_pickle(content, ())


class Calls:
    """Pickles as a call of anything with any arguments."""

    def __init__(self, function, *arguments, state=None):
        self.call = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self):
        return self.call


def attacks(marker):
    """Pickles that would make the file ``marker``, were they run by Python's own unpickler."""
    command = f"touch {marker}"
    source = f"open({str(marker)!r}, 'w').close()"
    yield "os.system", Calls(os.system, command)
    yield "eval", Calls(eval, source)
    yield "exec", Calls(exec, source)
    yield "in a list", [1, (2, {"three": Calls(exec, source)})]
    yield "a chain", Calls(operator.methodcaller("__call__", source), Calls(getattr, __builtins__, "exec"))
    yield "getattr", Calls(Calls(getattr, os, "system"), command)
    yield "an allowed name called otherwise", Calls(collections.defaultdict, Calls(exec, source))
    yield "state of a function", Calls(fractions.Fraction, 1, 2, state={"_numerator": Calls(exec, source)})
    yield "as a key", {Calls(exec, source): 1}


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_no_attack_runs_anything(protocol, tmp_path):
    marker = tmp_path / "run"
    refused = 0
    for name, attack in attacks(marker):
        try:
            content = pickle.dumps(attack, protocol)
        except (TypeError, pickle.PicklingError, AttributeError):
            continue  # this protocol cannot express it
        with pytest.raises(DocumentError, match="pickle"):
            load_pickle(content, {CLASS})
        assert not marker.exists(), name
        refused += 1
    assert refused >= 6


def test_the_attacks_are_real(tmp_path):
    marker = tmp_path / "run"
    for name, attack in attacks(marker):
        if name in ("os.system", "eval", "exec"):
            pickle.loads(pickle.dumps(attack))
            assert marker.exists()
            marker.unlink()


GLOBAL_RESULT = b"csome.tool\nResult\n"
HAND_MADE = {
    "__setstate__ by BUILD": GLOBAL_RESULT + b")\x81(X\x0c\x00\x00\x00__setstate__cos\nsystem\nd.",
    "BUILD with a command": GLOBAL_RESULT + b")\x81X\x07\x00\x00\x00touch xb.",
    "BUILD on a class": GLOBAL_RESULT + b"}b.",
    "arguments for the class": GLOBAL_RESULT + b"(K\x01t\x81.",
    "REDUCE of the class": GLOBAL_RESULT + b")R.",
    "INST": b"(S'touch x'\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nS'touch x'\no.",
    "NEWOBJ_EX": GLOBAL_RESULT + b")}\x92.",
    "EXT1": b"\x82\x01.",
    "PERSID": b"Panything\n.",
    "BINPERSID": b"K\x01Q.",
    "dtype of objects": b"cnumpy\ndtype\n(X\x02\x00\x00\x00O8\x89\x88tR.",
    "scalar of another dtype": b"cnumpy.core.multiarray\nscalar\n(K\x01C\x08........tR.",
    "scalar of wrong length": b"cnumpy.core.multiarray\nscalar\n(cnumpy\ndtype\n(X\x02\x00\x00\x00f8tRC\x04....tR.",
    "big-endian": b"cnumpy\ndtype\n(X\x02\x00\x00\x00f8tR(K\x03X\x01\x00\x00\x00>tb.",
    "STACK_GLOBAL of os": b"\x8c\x02os\x8c\x06system\x93.",
    "STACK_GLOBAL of numbers": b"K\x01K\x02\x93.",
    "append to a tuple": b")K\x01a.",
    "items of a list": b"]K\x01K\x02s.",
    "an odd number of items": b"}(K\x01u.",
    "no mark": b"K\x01t.",
    "a mark left": b"(.",
    "a mark in a tuple": b"(\x85.",
    "a mark in a list": b"](a.",
    "a mark that is kept": b"(q\x00K\x01.",
    "a value that is doubled": b"K\x01" + b"2.",
    "encoding by a codec of choice": b"c_codecs\nencode\n(X\x01\x00\x00\x00xX\x05\x00\x00\x00rot13tR.",
    "two results": b"K\x01K\x02.",
    "nothing": b".",
    "empty": b"",
    "no end": b"K\x01",
    "a memo that is not there": b"h\x05.",
    "unknown opcode": b"\xff.",
    "a text beyond the end": b"X\xff\xff\xff\x7fabc.",
    "a huge integer": b"\x8b" + struct.pack("<i", 100_000) + b"\x7f" * 100_000 + b".",
    "a huge decimal": b"I" + b"9" * 10_000 + b"\n.",
    "a spoilt text": b"X\x02\x00\x00\x00\xff\xfe.",
}


@pytest.mark.parametrize("name", HAND_MADE)
def test_hand_made_programs_are_refused(name):
    with pytest.raises(DocumentError, match="pickle"):
        load_pickle(b"\x80\x04" + HAND_MADE[name], {CLASS})


def test_a_mapping_whose_key_would_take_forever_to_hash():
    """A tuple of itself twice, a hundred times over: hashing it would take 2^100 steps; so would printing it."""
    program = b")" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(100))
    start = time.monotonic()
    value = load_pickle(b"\x80\x04}" + program + b"K\x01s.", ())
    assert isinstance(value, Pairs)
    assert time.monotonic() - start < 30  # not 2^100 steps


@pytest.mark.parametrize("length", [9, 100_000])
def test_a_text_longer_than_a_number_is_never_encoded(length):
    """Kept once and encoded a thousand times, it would take a thousand times the file."""
    text = b"X" + struct.pack("<I", length) + b"a" * length + b"q\x00"
    calls = b"c_codecs\nencode\nq\x01](" + b"h\x01h\x00X\x06\x00\x00\x00latin1\x86R" * 1000 + b"e"
    with pytest.raises(DocumentError, match=r"calls '_codecs\.encode', whose result is not plain data"):
        load_pickle(b"\x80\x02" + text + calls + b"\x87.", ())


def test_a_list_that_holds_itself_ends():
    value = load_pickle(b"\x80\x02]q\x00h\x00a.", ())
    assert value[0] is value


def test_deep_nesting_does_not_overflow():
    assert type(load_pickle(b"\x80\x02)" + b"\x85" * 200_000 + b".", ())) is tuple


def test_programs_are_limited(monkeypatch):
    monkeypatch.setattr(pickled, "MAX_OPCODES", 100)
    with pytest.raises(DocumentError, match="more than 100 opcodes"):
        load_pickle(pickle.dumps(list(range(1000))), ())


@given(place=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_spoilt_bytes_are_refused_or_plain(place, byte):
    content = bytearray(pickle.dumps({"a": [(1, 2.5), (2, None)], "b": ("x", 7)}))
    content[place % len(content)] = byte
    try:
        load_pickle(bytes(content), {CLASS})
    except DocumentError as error:
        assert "pickle" in str(error)  # noqa: PT017
