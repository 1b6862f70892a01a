"""Convert values of one input or output between JSON or binary data and slots (`tensors` handles whole requests)."""

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

# The letters of `struct` for datatypes that JSON can carry, and Python's types of their values.
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
# Most characters of a value in JSON: FP64 has 24, and a comma.
MOST_CHARACTERS = 25
# Larger data are counted before they are parsed: Python's numbers take much more memory than a comma. Counting takes a
# thirtieth of the time of parsing (own measurement 2026-11-25).
_LONG_BYTES = 2**16
# Characters of a received name or text that messages show.
SHOWN = 80
# msgspec's message for a truncated text, and also for half of a surrogate pair so close to the end that the other half
# would have no room.
_CUT_OFF, _HALF_BYTES = "Input data was truncated", 12
_HALF = re.compile(rb"\\u[dD][89abAB]..[^\\]")


class BadRequest(ServingError):  # noqa: N818 - as HTTP calls it
    """A request that is invalid for this model; the message is for the client."""


class NotFinite(ServingError):  # noqa: N818 - named after the output's values
    """An output has values that JSON cannot carry."""


class InputParameters(msgspec.Struct, gc=False):
    """The parameters of an input, as in the protocol."""

    binary_data_size: int | None = None
    shared_memory_region: str | None = None


class Input(msgspec.Struct, gc=False):
    """An input in a request, before it is checked against the model."""

    name: str
    shape: list[int]
    datatype: str
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    parameters: InputParameters | None = None


_NO_PARAMETERS = InputParameters()
# Exceptions of decoders for invalid JSON, too deep nesting, and integers that are too long.
NOT_DECODED = (msgspec.DecodeError, RecursionError, ValueError)


class InputPlace:
    """An input of a model, and where its values are in each slot: from byte ``offset`` on.

    ``place`` is the input's index; ``rows`` are its bytes in all slots, an array (slots, bytes of a sample).
    """

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
        """Return the bytes of ``count`` samples for a slab, from an input without binary data. Raises BadRequest."""
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
            # Every comma separates two values, except those in strings, which are invalid anyway.
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
        """Return the bytes of ``count`` samples for a slab, from flat values. Raises BadRequest."""
        if len(values) != count * self._size:
            raise self._has_other_size(len(values), count)
        try:
            return self._one.pack(*values) if count == 1 else struct.pack(f"={len(values)}{self._letter}", *values)
        except (struct.error, OverflowError):
            raise BadRequest(self._explain_range(values)) from None

    def take(
        self, item: Input, parameters: InputParameters, rest: bytes | memoryview, at: int, count: int
    ) -> tuple[bytes | memoryview, int]:
        """Return the bytes of ``count`` samples, and how many bytes of ``rest`` they use. Raises BadRequest.

        ``rest`` is the binary data after the JSON; the input's data start at ``at``, if it is sent as binary.
        """
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
                f"Input {self.name!r} has {size} bytes, but only {len(value)} of them follow the JSON; expected all, "
                "and Inference-Header-Content-Length with the length of the JSON."
            )
        self._check_bytes(value)
        return value, size

    def take_raw(self, value: bytes, count: int) -> bytes:
        """Return the binary data of ``count`` samples unchanged. Raises BadRequest if their size is wrong."""
        if len(value) != count * self.sample_bytes:
            raise BadRequest(
                f"Input {self.name!r} has {len(value)} bytes; expected {count * self.sample_bytes} for {self.datatype} "
                f"of its shape {[count, *self.shape]}."
            )
        self._check_bytes(value)
        return value

    def lies_elsewhere(self) -> BadRequest:
        """Return the error for an input that is in shared memory, which is not supported."""
        return BadRequest(f"Input {self.name!r} is in shared memory, which is not supported; send its data.")

    def _check_bytes(self, value: bytes | memoryview) -> None:
        if self.datatype == "BOOL" and np.frombuffer(value, np.uint8).max(initial=0) > 1:
            raise BadRequest(f"Input {self.name!r} is BOOL and has bytes other than 0 and 1; expected 0 or 1.")

    def _flatten(self, data: msgspec.Raw, count: int, error: Exception) -> list[Any]:
        """Return the values of data that are nested like the shape. Raises BadRequest."""
        try:
            values = self._nested.decode(data)
        except msgspec.ValidationError as deeper:
            # Nested data fail as a flat list at the first entry; the error of the nested form is more helpful.
            told = deeper if self.shape and "got `array`" in str(error) else error
            raise BadRequest(
                f"Input {self.name!r} is {self.datatype}, but its data are not {_WORDS[self._type]}, flat or nested as "
                f"its shape {[count, *self.shape]}: {told}."
            ) from None
        except NOT_DECODED as wrong:
            raise BadRequest(explain(wrong)) from None
        sizes = [count, *self.shape]
        level: list[Any] = [values]
        for size in sizes:
            if any(len(part) != size for part in level):
                raise BadRequest(f"Input {self.name!r} has nested data that do not match its shape {sizes}.")
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
                return f"Input {self.name!r} has the value {shorten(value)}, which is out of range for {self.datatype}."
        return f"Input {self.name!r} has values that are out of range for {self.datatype}."


class OutputPlace:
    """An output of a model, and where its values are in each slot: from byte ``offset`` on.

    ``rows``, shape (slots, bytes per sample): the output's bytes in each slot; ``values``: the same bytes as numbers,
    a row per slot. ``size``: the number of values of a sample.
    """

    def __init__(self, spec: TensorSpec, offset: int, rows: NDArray[np.uint8], values: NDArray[Any]) -> None:
        self.name, self.datatype, self.offset, self.sample_bytes = spec.name, spec.datatype, offset, spec.num_bytes
        self.shape, self.can_be_json = list(spec.shape), spec.datatype in _LETTERS
        self.rows = rows[:, offset : offset + spec.num_bytes]
        # Flat, as clients expect; not a copy, as samples are contiguous.
        self._values = values.reshape(len(values), -1)
        self.size = self._values.shape[1]
        name = msgspec.json.encode(spec.name)
        self._head = b'{"name":' + name + b',"datatype":"' + spec.datatype.encode() + b'","shape":['
        self._sizes = b"".join(b",%d" % size for size in spec.shape) + b"],"
        self.head_of_one = self.head(1)

    def head(self, count: int) -> bytes:
        """Return the JSON of this output up to its data."""
        return self._head + b"%d" % count + self._sizes

    def data(self, slots: list[int]) -> bytes:
        """Return the JSON of the values in these slots. Raises NotFinite."""
        values = self._values[slots[0]] if len(slots) == 1 else self._values[slots].reshape(-1)
        text = orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)
        # Only values that are not finite are written as null.
        if b"null" in text:
            raise NotFinite(
                f"Output {self.name!r} has values that are not finite, which JSON cannot carry; request it with the "
                "parameter binary_data, or for all with binary_data_output."
            )
        return text


def explain(error: Exception, text: bytes | memoryview = b"") -> str:
    """Return a sentence for the client: why the JSON ``text`` of a request could not be decoded."""
    if isinstance(error, msgspec.ValidationError):
        return f"The request does not follow the Open Inference Protocol: {str(error)[: 4 * SHOWN]}."
    if isinstance(error, RecursionError):
        return "The request's JSON is nested too deeply; expected data that are nested like their shape, or flat."
    if str(error) == _CUT_OFF and _HALF.search(text[-_HALF_BYTES:]):
        return "The request is not JSON: a string has half of a surrogate pair; expected both halves, or the character."
    return f"The request is not JSON: {str(error)[: 4 * SHOWN]}."


def shorten(value: Any) -> str:
    """Return a received value as text, of at most `SHOWN` characters."""
    try:
        text = str(value)
    except ValueError:  # an integer of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"
