"""A stranger's pickle as plain data: numbers, texts, tuples, lists, mappings and objects of the classes that are named.

The opcodes are interpreted here, over a list of those that build data; Python's own unpickler is never called, nothing
is imported and nothing is run. A name of a module is only a `GlobalName`; what may be made from one is decided by it
alone:

    numpy.core.multiarray.scalar(dtype, bytes)   a float64 or int64      numpy.dtype('f8' or 'i8', ...)   its dtype
    collections.defaultdict(list)                an empty mapping        _codecs.encode(text, 'latin1')   bytes
    a class that is named                        an `PickledObject`

Mappings stay lists of pairs (`Pairs`): to hash a key that shares its parts a hundred times over would never end.
Source of the opcodes: pickletools of CPython, protocols 2 to 5.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from meshwright.spec import DocumentError

# The database of 8,000 collectives takes 104,000; each costs about a microsecond and a hundred bytes.
MAX_OPCODES = 5_000_000
# Longer integers cannot be sizes or counts; decoding them would take time and memory.
_MAX_INTEGER_BYTES = 16

_REMEDY = "Only tables of numbers are read; write the file anew as CSV or parquet if you trust its origin."
_SCALARS = {"f8": "<d", "i8": "<q"}
# A text stands for the bytes of one number; a longer one, kept once and encoded often, would fill the memory.
_MAX_ENCODED = max(map(struct.calcsize, _SCALARS.values()))


@dataclass(frozen=True, slots=True)
class GlobalName:
    """A global that the pickle asks for; never looked up."""

    text: str


@dataclass(slots=True, eq=False)
class Pairs:
    """A mapping: its keys and values in order."""

    items: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class PickledObject:
    """An object of a class that may be read: its attributes, as the pickle gives them."""

    name: str
    state: Pairs | None = None


@dataclass(slots=True, eq=False)
class _Dtype:
    code: str


_MARK = object()


def load_pickle(content: bytes, classes: Collection[str]) -> Any:
    """The plain data of a pickle whose objects are of ``classes`` ("module.Name"); DocumentError for all else."""
    machine = _Machine(frozenset(classes))
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
            if count >= MAX_OPCODES:
                raise DocumentError(f"A pickle of more than {MAX_OPCODES} steps. {_REMEDY}")
            if opcode.name == "STOP":
                return machine.result()
            machine.step(opcode.name, argument)
    except (ValueError, IndexError, KeyError, struct.error, OverflowError):
        pass
    raise DocumentError(f"A pickle that is cut off or spoilt. {_REMEDY}")


class _Machine:
    """Stack and memo of the pickle's program, holding plain data only."""

    def __init__(self, classes: frozenset[str]) -> None:
        self._classes = classes
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def result(self) -> Any:
        value = self.pop()
        if self._stack:
            raise ValueError("more than one value")
        return value

    def pop(self, place: int = -1) -> Any:
        """Pop a value from the stack. Raises for a mark, which is not a value."""
        value = self._stack.pop(place)
        if value is _MARK:
            raise ValueError("a mark where a value belongs")
        return value

    def step(self, name: str, argument: Any) -> None:
        if name in ("PROTO", "FRAME"):
            return
        if name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name]())
        elif name in _WITH_VALUE:
            self._stack.append(_checked(argument))
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._stack.append(self.pop())
            self._memo[len(self._memo) if name == "MEMOIZE" else argument] = self._stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            self._stack.append(self._memo[argument])
        elif name == "GLOBAL":
            self._stack.append(self._name(str(argument).replace(" ", ".", 1)))
        elif name in _ACTIONS:
            _ACTIONS[name](self)
        else:
            raise DocumentError(f"A pickle that asks for {name}, which plain data never needs. {_REMEDY}")

    def _name(self, text: str) -> GlobalName:
        if text not in self._classes and text not in _KNOWN_NAMES:
            raise DocumentError(f"A pickle that asks for {text[:200]!r}, which is not plain data. {_REMEDY}")
        return GlobalName(text)

    def since_mark(self) -> list[Any]:
        """Take the values since the last mark, and the mark, off the stack."""
        place = len(self._stack) - 1
        while self._stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise ValueError("no mark")
        items = self._stack[place + 1 :]
        del self._stack[place:]
        return items

    def tuple_of(self, count: int | None) -> None:
        """The last ``count`` values, or those since the mark, as one tuple."""
        items = self.since_mark() if count is None else [self.pop() for _ in range(count)][::-1]
        self._stack.append(tuple(items))

    def append(self, items: list[Any]) -> None:
        """Add to the list on top."""
        if type(self._stack[-1]) is not list:
            raise ValueError("no list")
        self._stack[-1].extend(items)

    def set_items(self, items: list[Any]) -> None:
        """Add keys and values in turn to the mapping on top."""
        if not isinstance(self._stack[-1], Pairs) or len(items) % 2:
            raise ValueError("no mapping")
        self._stack[-1].items.extend(zip(items[::2], items[1::2], strict=True))

    def stack_global(self) -> None:
        """A global named by two texts."""
        last, first = self.pop(), self.pop()
        if type(first) is not str or type(last) is not str:
            raise ValueError("no names")
        self._stack.append(self._name(f"{first}.{last}"))

    def new_object(self) -> None:
        """An object of a class that was named; arguments are never given to it."""
        arguments, name = self.pop(), self.pop()
        if not isinstance(name, GlobalName) or name.text not in self._classes or arguments != ():
            raise DocumentError(f"A pickle that makes an object which is not plain data. {_REMEDY}")
        self._stack.append(PickledObject(name.text))

    def reduce(self) -> None:
        """One of the few calls that stand for plain data."""
        arguments, name = self.pop(), self.pop()
        if not isinstance(name, GlobalName) or type(arguments) is not tuple:
            raise ValueError("no call")
        match name.text, arguments:
            case ("numpy.dtype", (str() as code, *_)) if code in _SCALARS:
                self._stack.append(_Dtype(code))
            case (
                "numpy.core.multiarray.scalar" | "numpy._core.multiarray.scalar",
                (_Dtype() as dtype, bytes() as raw),
            ):
                self._stack.append(struct.unpack(_SCALARS[dtype.code], raw)[0])
            case ("collections.defaultdict", ()) | ("collections.defaultdict", (GlobalName(),)):
                self._stack.append(Pairs())
            case ("_codecs.encode", (str() as text, "latin1")) if len(text) <= _MAX_ENCODED:
                self._stack.append(text.encode("latin1"))
            case _:
                raise DocumentError(f"A pickle that calls {name.text!r} in a way that is not plain data. {_REMEDY}")

    def build(self) -> None:
        """The attributes of an object, or the byte order of a dtype, which must be the usual one."""
        state, target = self.pop(), self._stack[-1]
        if isinstance(target, PickledObject) and isinstance(state, Pairs):
            target.state = state
        elif not (isinstance(target, _Dtype) and type(state) is tuple and len(state) > 1 and state[1] == "<"):
            raise DocumentError(f"A pickle that sets the state of something that is not plain data. {_REMEDY}")


def _checked(value: Any) -> Any:
    if type(value) is int and value.bit_length() > 8 * _MAX_INTEGER_BYTES:
        raise DocumentError(f"A pickle with an integer of {value.bit_length()} bits. {_REMEDY}")
    return value


_KNOWN_NAMES = frozenset(
    (
        "numpy.dtype",
        "numpy.core.multiarray.scalar",
        "numpy._core.multiarray.scalar",
        "collections.defaultdict",
        "_codecs.encode",
        "builtins.list",
        "__builtin__.list",
    )
)
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "MARK": lambda: _MARK,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": Pairs,
}
_INTEGERS = ("BININT", "BININT1", "BININT2", "LONG1", "LONG4")
_TEXTS = ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8")
_WITH_VALUE = frozenset((*_INTEGERS, *_TEXTS, "BINFLOAT"))
_ACTIONS: dict[str, Callable[[_Machine], None]] = {
    "TUPLE": lambda machine: machine.tuple_of(None),
    "TUPLE1": lambda machine: machine.tuple_of(1),
    "TUPLE2": lambda machine: machine.tuple_of(2),
    "TUPLE3": lambda machine: machine.tuple_of(3),
    "APPEND": lambda machine: machine.append([machine.pop()]),
    "APPENDS": lambda machine: machine.append(machine.since_mark()),
    "SETITEM": lambda machine: machine.set_items([machine.pop(-2), machine.pop()]),
    "SETITEMS": lambda machine: machine.set_items(machine.since_mark()),
    "STACK_GLOBAL": _Machine.stack_global,
    "NEWOBJ": _Machine.new_object,
    "REDUCE": _Machine.reduce,
    "BUILD": _Machine.build,
}
