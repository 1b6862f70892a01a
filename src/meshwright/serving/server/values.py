"""Values of one input or output, between JSON or binary and the rows of a slab (`tensors` has whole requests)."""

from __future__ import annotations

import re
import struct
from itertools import chain
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import orjson

from meshwright.spec import ServingError, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

# How `struct` calls the datatypes that JSON can carry, and what Python has for their values.
_LETTERS = {
    "BOOL": ("?", bool),
    "UINT8": ("B", int),
    "UINT16": ("H", int),
    "UINT32": ("I", int),
    "UINT64": ("Q", int),
    "INT8": ("b", int),
    "INT16": ("h", int),
    "INT32": ("i", int),
    "INT64": ("q", int),
    "FP32": ("f", float),
    "FP64": ("d", float),
}
_WORDS = {bool: "true or false", int: "integers", float: "numbers"}
# Characters of a value in JSON, at most: FP64 has 24, and a comma.
MOST_CHARACTERS = 25
# Data of more bytes are counted before they are read: Python's numbers take many times the room that a comma takes. To
# count them costs a thirtieth of reading them (own measurement 2026-11-25).
_LONG_BYTES = 2**16
# A name or text of a stranger is shown so far.
SHOWN = 80
# What msgspec says of a text that was cut off, and also of half of a surrogate pair so close to the end that the other
# half would have no room.
_CUT_OFF, _HALF_BYTES = "Input data was truncated", 12
_HALF = re.compile(rb"\\u[dD][89abAB]..[^\\]")


class BadRequest(ServingError):  # noqa: N818 - as HTTP calls it
    """A request that means nothing to this model; the message is for whoever sent it."""


class NotFinite(ServingError):  # noqa: N818 - it is the output that is not
    """An output has values that JSON cannot carry."""


class InputParameters(msgspec.Struct, gc=False):
    """What a request says of an input besides."""

    binary_data_size: int | None = None
    shared_memory_region: str | None = None


class Input(msgspec.Struct, gc=False):
    """An input as a request has it."""

    name: str
    shape: list[int]
    datatype: str
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    parameters: InputParameters | None = None


_NO_PARAMETERS = InputParameters()
# What decoders raise for what is not JSON, or not as it should be: too deeply nested, and integers that are too long.
NOT_DECODED = (msgspec.DecodeError, RecursionError, ValueError)


class InputPlace:
    """An input, and where it lies in each slot."""

    def __init__(self, spec: TensorSpec, place: int, offset: int, rows: NDArray[np.uint8]) -> None:
        self.name, self.datatype, self.place, self.offset = spec.name, spec.datatype, place, offset
        self.shape, self.shape_of_one, self.sample_bytes = list(spec.shape), [1, *spec.shape], spec.num_bytes
        self.rows = rows[:, offset : offset + spec.num_bytes]
        self._size = int(np.prod(spec.shape, dtype=np.int64))
        self._letter, self._type = _LETTERS.get(spec.datatype, ("", float))
        self._one = struct.Struct(f"={self._size}{self._letter or 'x'}")
        nested: Any = list[self._type]  # type: ignore[name-defined]
        self._flat = msgspec.json.Decoder(nested)
        for _ in spec.shape:
            nested = list[nested]
        self._nested = msgspec.json.Decoder(nested)

    def pack(self, item: Input, count: int) -> Any:
        """Values of so many samples, as a slab has them, where no bytes follow the JSON. Raises BadRequest."""
        data, parameters = item.data, item.parameters
        if parameters is not None and parameters != _NO_PARAMETERS:
            return self.take(item, parameters, b"", 0, count)[0]
        if data is msgspec.UNSET:
            raise BadRequest(f"Input {self.name!r} has no data; expected data, or binary_data_size.")
        if not self._letter:
            raise BadRequest(
                f"Input {self.name!r} is {self.datatype}, which JSON cannot carry; send it as binary, with "
                "binary_data_size."
            )
        if len(data) > _LONG_BYTES:
            # Each of them but those in texts, which are no values either, stands between two values.
            commas = int(np.count_nonzero(np.frombuffer(data, np.uint8) == ord(",")))
            if commas >= count * self._size:
                raise self._has_other_size(commas + 1, count)
        try:
            values = self._flat.decode(data)
        except msgspec.ValidationError as error:
            values = self._flatten(data, count, error)
        except NOT_DECODED as error:
            raise BadRequest(explain(error)) from None
        return self.pack_values(values, count)

    def pack_values(self, values: Sequence[Any], count: int) -> bytes:
        """Values of so many samples, flat, as a slab has them. Raises BadRequest."""
        if len(values) != count * self._size:
            raise self._has_other_size(len(values), count)
        try:
            return self._one.pack(*values) if count == 1 else struct.pack(f"={len(values)}{self._letter}", *values)
        except (struct.error, OverflowError):
            raise BadRequest(self._explain_range(values)) from None

    def take(
        self, item: Input, parameters: InputParameters, rest: bytes | memoryview, at: int, count: int
    ) -> tuple[bytes | memoryview, int]:
        """Values of so many samples, and how many bytes of those that follow the JSON they are. Raises BadRequest."""
        size = parameters.binary_data_size
        if parameters.shared_memory_region is not None:
            raise self.lies_elsewhere()
        if size is None:
            return self.pack(item, count), 0
        if item.data is not msgspec.UNSET:
            raise BadRequest(f"Input {self.name!r} has both data and binary_data_size; expected one of them.")
        if size != count * self.sample_bytes:
            raise BadRequest(
                f"Input {self.name!r} has a binary_data_size of {shorten(size)}; expected {count * self.sample_bytes} "
                f"for {self.datatype} of its shape {[count, *self.shape]}."
            )
        value = rest[at : at + size]
        if len(value) != size:
            raise BadRequest(
                f"Input {self.name!r} has {size} bytes, of which {len(value)} follow the JSON; expected all of them, "
                "and Inference-Header-Content-Length with the length of the JSON."
            )
        self._check_bytes(value)
        return value, size

    def take_raw(self, value: bytes, count: int) -> bytes:
        """Values of so many samples that came as bytes, if they are as many as they should be. Raises BadRequest."""
        if len(value) != count * self.sample_bytes:
            raise BadRequest(
                f"Input {self.name!r} has {len(value)} bytes; expected {count * self.sample_bytes} for {self.datatype} "
                f"of its shape {[count, *self.shape]}."
            )
        self._check_bytes(value)
        return value

    def lies_elsewhere(self) -> BadRequest:
        """How shared memory is refused."""
        return BadRequest(f"Input {self.name!r} lies in shared memory, which is not supported; send its data.")

    def _check_bytes(self, value: bytes | memoryview) -> None:
        if self.datatype == "BOOL" and np.frombuffer(value, np.uint8).max(initial=0) > 1:
            raise BadRequest(f"Input {self.name!r} is BOOL and has bytes that are neither 0 nor 1; expected these.")

    def _flatten(self, data: msgspec.Raw, count: int, error: Exception) -> list[Any]:
        """Values that are nested as the shape is."""
        try:
            values = self._nested.decode(data)
        except msgspec.ValidationError as deeper:
            # What is nested fails as a flat list at its first entry, and is better told as what it is.
            told = deeper if self.shape and "got `array`" in str(error) else error
            raise BadRequest(
                f"Input {self.name!r} is {self.datatype} and its data are not {_WORDS[self._type]}, flat or nested as "
                f"its shape {[count, *self.shape]}: {told}."
            ) from None
        except NOT_DECODED as wrong:
            raise BadRequest(explain(wrong)) from None
        sizes = [count, *self.shape]
        level: list[Any] = [values]
        for size in sizes:
            if any(len(part) != size for part in level):
                raise BadRequest(f"Input {self.name!r} has nested data that are not of its shape {sizes}; expected so.")
            level = list(chain.from_iterable(level))
        return level

    def _has_other_size(self, number: int, count: int) -> BadRequest:
        return BadRequest(
            f"Input {self.name!r} has {number} values; expected {count * self._size} for its shape "
            f"{[count, *self.shape]}."
        )

    def _explain_range(self, values: Sequence[Any]) -> str:
        for value in values:
            try:
                struct.pack(f"={self._letter}", value)
            except (struct.error, OverflowError):
                return f"Input {self.name!r} has the value {shorten(value)}, which is none of {self.datatype}."
        return f"Input {self.name!r} has values that are none of {self.datatype}."


class OutputPlace:
    """An output, and where it lies in each slot."""

    def __init__(self, spec: TensorSpec, offset: int, rows: NDArray[np.uint8], values: NDArray[Any]) -> None:
        self.name, self.datatype, self.offset, self.sample_bytes = spec.name, spec.datatype, offset, spec.num_bytes
        self.shape, self.can_be_json = list(spec.shape), spec.datatype in _LETTERS
        self.rows = rows[:, offset : offset + spec.num_bytes]
        # Flat, as clients are used to; no copy, as samples lie in one piece.
        self._values = values.reshape(len(values), -1)
        self.size = self._values.shape[1]
        name = msgspec.json.encode(spec.name)
        self._head = b'{"name":' + name + b',"datatype":"' + spec.datatype.encode() + b'","shape":['
        self._sizes = b"".join(b",%d" % size for size in spec.shape) + b"],"
        self.head_of_one = self.head(1)

    def head(self, count: int) -> bytes:
        """JSON of this output up to its data."""
        return self._head + b"%d" % count + self._sizes

    def data(self, slots: list[int]) -> bytes:
        """JSON of the values in these slots. Raises NotFinite."""
        values = self._values[slots[0]] if len(slots) == 1 else self._values[slots].reshape(-1)
        text = orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)
        # What is not finite is written as null, and nothing else is.
        if b"null" in text:
            raise NotFinite(
                f"Output {self.name!r} has values that are not finite, which JSON cannot carry; ask for it with the "
                "parameter binary_data, or for all with binary_data_output."
            )
        return text


def explain(error: Exception, text: bytes | memoryview = b"") -> str:
    """Why something could not be decoded, of which this is the text."""
    if isinstance(error, msgspec.ValidationError):
        return f"The request is none of the Open Inference Protocol: {str(error)[: 4 * SHOWN]}."
    if isinstance(error, RecursionError):
        return "The request's JSON is nested too deeply; expected data that are nested as their shape is, or flat."
    if str(error) == _CUT_OFF and _HALF.search(text[-_HALF_BYTES:]):
        return "The request is not JSON: a text has half of a surrogate pair; expected both halves, or the character."
    return f"The request is not JSON: {str(error)[: 4 * SHOWN]}."


def shorten(value: Any) -> str:
    """A value of a stranger, not too long."""
    try:
        text = str(value)
    except ValueError:  # an integer of thousands of digits
        return "an endless number"
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"
