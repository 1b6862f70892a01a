"""Requests and answers of the Open Inference Protocol (version 2), between bytes and the rows of a slab; no I/O.

A request is JSON, or JSON with tensors after it (the "binary tensor data" extension: whoever sends it says how long the
JSON is, and of each input that follows how many bytes it has). Each input has a shape [n, *that of one sample], with
the same n for all; so have the outputs. `Codec.decode` checks all of it and gives an `Asked`, or raises `BadRequest`
with a sentence for whoever sent it; `Codec.write` puts the values into slots, and `Codec.encode` makes an answer of
them.

What is decided here, where the protocol leaves it open:

- Data in JSON are flat, or nested exactly as the shape is. Integers are written without a fraction, and fit into their
  datatype; booleans are true and false. FP16 and BF16 travel as binary only, in both directions.
- JSON knows neither NaN nor infinity. A request that has them is refused. An output that has them cannot be sent as
  JSON (a null, or text, would break clients where they least expect it): `NotFinite` says to ask for it as binary.
- Parameters that nobody knows are ignored, as are unknown members; those that would change the answer and are not
  supported (``shared_memory_region``, ``classification``, ``sequence_id``) are refused.
"""

from __future__ import annotations

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

    from meshwright.serving.server.gate import ModelFacts

# Samples of one request; more are several requests, which also wait less for each other.
MOST_SAMPLES = 1024
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
_MOST_CHARACTERS = 25
# A name or text of a stranger is shown so far.
_SHOWN = 80


class BadRequest(ServingError):  # noqa: N818 - as HTTP calls it
    """A request that means nothing to this model; the message is for whoever sent it."""


class NotFinite(ServingError):  # noqa: N818 - it is the output that is not
    """An output has values that JSON cannot carry."""


class _InputParameters(msgspec.Struct, gc=False):
    binary_data_size: int | None = None
    shared_memory_region: str | None = None


class _Input(msgspec.Struct, gc=False):
    name: str
    shape: list[int]
    datatype: str
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    parameters: _InputParameters | None = None


class _OutputParameters(msgspec.Struct, gc=False):
    binary_data: bool | None = None
    classification: int | None = None
    shared_memory_region: str | None = None


class _Output(msgspec.Struct, gc=False):
    name: str
    parameters: _OutputParameters | None = None


class _Parameters(msgspec.Struct, gc=False):
    binary_data_output: bool = False
    timeout: int | None = None
    priority: int | None = None
    sequence_id: int | str | None = None


class _Request(msgspec.Struct, gc=False):
    inputs: list[_Input]
    id: str | None = None
    outputs: list[_Output] | None = None
    parameters: _Parameters | None = None


_REQUESTS = msgspec.json.Decoder(_Request)
# What decoders raise for what is not JSON, or not as it should be: too deeply nested, and integers that are too long.
_NOT_DECODED = (msgspec.DecodeError, RecursionError, ValueError)


class Asked:
    """A request that was understood: ``count`` samples, ``values`` of each input, and which outputs are wanted how.

    ``timeout_us`` and ``priority`` are None where the request does not say them; nothing follows from ``priority`` yet.
    """

    __slots__ = ("count", "id", "outputs", "priority", "timeout_us", "values")

    def __init__(self, count: int, values: list[Any], outputs: Sequence[tuple[_OutputPlace, bool]]) -> None:
        self.count, self.values, self.outputs = count, values, outputs
        self.id: str | None = None
        self.timeout_us: int | None = None
        self.priority: int | None = None


class Codec:
    """Reads and writes what one model takes and gives."""

    def __init__(self, model: ModelFacts) -> None:
        slab = model.slab
        names, size = slab.slots.dtype.fields, slab.slots.itemsize
        assert names is not None
        cells = slab.slots.view(np.uint8)
        rows = cells.reshape(len(slab), size)
        self._memory, self._slot_bytes = cells.data, size
        self._inputs = [
            _InputPlace(spec, place, names[f"i{place}"][1], rows) for place, spec in enumerate(model.inputs)
        ]
        outputs = [
            _OutputPlace(spec, names[f"o{place}"][1], rows, slab.outputs[place])
            for place, spec in enumerate(model.outputs)
        ]
        self._by_name = {place.name: place for place in self._inputs}
        self._outputs = {place.name: place for place in outputs}
        self._all_as_json = [(place, False) for place in outputs]
        self._all_as_binary = [(place, True) for place in outputs]
        self._all_can_be_json = all(place.can_be_json for place in outputs)
        self.most = min(MOST_SAMPLES, len(slab))
        # Bytes of an answer for one sample, about.
        self.answer_bytes = sum(place.sample_bytes + place.size * _MOST_CHARACTERS for place in outputs)
        name, version = (msgspec.json.encode(each) for each in (model.name, model.version))
        self._begin = b'{"model_name":' + name + b',"model_version":' + version + b',"outputs":['

    def decode(self, body: bytes, json_bytes: int | None = None) -> Asked:
        """Read a request; ``json_bytes`` is how long the JSON is if tensors follow it. Raises BadRequest."""
        text: bytes | memoryview = body
        rest: bytes | memoryview = b""
        if json_bytes is not None:
            view = memoryview(body)
            text, rest = view[:json_bytes], view[json_bytes:]
        try:
            request = _REQUESTS.decode(text)
        except _NOT_DECODED as error:
            raise BadRequest(_explain(error)) from None
        values: list[Any] = [None] * len(self._inputs)
        count, at = 0, 0
        for item in request.inputs:
            place = self._by_name.get(item.name)
            if place is None or values[place.place] is not None or item.datatype != place.datatype:
                raise BadRequest(self._explain_input(item, place))
            number = 1 if item.shape == place.shape_of_one else self._count(place, item.shape)
            if count != number:
                if count:
                    raise BadRequest(
                        f"Input {place.name!r} has {number} samples, and one before it {count}; expected as many."
                    )
                count = number
            if item.parameters is None:
                values[place.place] = place.pack(item.data, number)
            else:
                values[place.place], size = place.take(item, item.parameters, rest, at, number)
                at += size
        if len(request.inputs) != len(values):
            missing = [place.name for place, value in zip(self._inputs, values, strict=True) if value is None]
            raise BadRequest(f"Inputs are missing: {', '.join(map(repr, missing))}.")
        if at != len(rest):
            raise BadRequest(
                f"{len(rest)} bytes follow the JSON, and inputs say binary_data_size of {at} in sum; expected as many."
            )
        return self._asked(request, count, values)

    def write(self, asked: Asked, slots: list[int]) -> None:
        """Put the values of a request into as many slots."""
        if asked.count == 1:
            begin = slots[0] * self._slot_bytes
            for place, value in zip(self._inputs, asked.values, strict=True):
                at = begin + place.offset
                self._memory[at : at + place.sample_bytes] = value
        else:
            for place, value in zip(self._inputs, asked.values, strict=True):
                place.rows[slots] = np.frombuffer(value, np.uint8).reshape(asked.count, place.sample_bytes)

    def encode(self, asked: Asked, slots: list[int]) -> tuple[bytes, int | None]:
        """An answer's body, and the length of its JSON if tensors follow it. Raises NotFinite."""
        pieces, blocks = [self._begin], []
        for place, is_binary in asked.outputs:
            pieces.append(place.head_of_one if asked.count == 1 else place.head(asked.count))
            if is_binary:
                pieces.append(b'"parameters":{"binary_data_size":%d}}' % (asked.count * place.sample_bytes))
                blocks.append(self._block(place, slots))
            else:
                pieces += (b'"data":', place.data(slots), b"}")
            pieces.append(b",")
        pieces[-1] = b"]}" if asked.id is None else b'],"id":' + msgspec.json.encode(asked.id) + b"}"
        if not blocks:
            return b"".join(pieces), None
        text = b"".join(pieces)
        return b"".join((text, *blocks)), len(text)

    def _block(self, place: _OutputPlace, slots: list[int]) -> Any:
        if len(slots) == 1:
            at = slots[0] * self._slot_bytes + place.offset
            return self._memory[at : at + place.sample_bytes]
        return place.rows[slots].tobytes()

    def _asked(self, request: _Request, count: int, values: list[Any]) -> Asked:
        """The rest of a request: which outputs, and how; how long it may take."""
        parameters = request.parameters
        as_binary = parameters is not None and parameters.binary_data_output
        outputs = self._all_as_binary if as_binary else self._all_as_json
        if request.outputs:
            outputs = self._chosen(request.outputs, as_binary)
        elif not as_binary and not self._all_can_be_json:
            outputs = self._chosen([_Output(name) for name in self._outputs], False)
        asked = Asked(count, values, outputs)
        asked.id = request.id
        if parameters is not None:
            timeout, priority = parameters.timeout, parameters.priority
            if timeout is not None and timeout < 1:
                raise BadRequest(f"The parameter timeout is {timeout}; expected microseconds, at least 1.")
            if priority is not None and not 0 <= priority < 2**64:
                raise BadRequest(f"The parameter priority is {priority}; expected an integer from 0 on, of 64 bits.")
            if parameters.sequence_id:
                raise BadRequest("The parameter sequence_id was given; models here remember nothing. Leave it out.")
            asked.timeout_us, asked.priority = timeout, priority
        return asked

    def _chosen(self, items: Sequence[_Output], as_binary: bool) -> list[tuple[_OutputPlace, bool]]:
        chosen: dict[str, tuple[_OutputPlace, bool]] = {}
        for item in items:
            place, parameters = self._outputs.get(item.name), item.parameters
            if place is None:
                raise BadRequest(
                    f"There is no output {item.name[:_SHOWN]!r}; expected one of {', '.join(map(repr, self._outputs))}."
                )
            if item.name in chosen:
                raise BadRequest(f"Output {item.name!r} is asked for twice; expected once.")
            is_binary = as_binary
            if parameters is not None:
                if parameters.classification is not None or parameters.shared_memory_region is not None:
                    raise BadRequest(
                        f"Output {item.name!r} is asked for with classification or shared_memory_region, which are not "
                        "supported; leave them out."
                    )
                is_binary = as_binary if parameters.binary_data is None else parameters.binary_data
            if not is_binary and not place.can_be_json:
                raise BadRequest(
                    f"Output {place.name!r} is {place.datatype}, which JSON cannot carry; ask for it with the "
                    "parameter binary_data, or for all with binary_data_output."
                )
            chosen[item.name] = (place, is_binary)
        return list(chosen.values())

    def _count(self, place: _InputPlace, shape: list[int]) -> int:
        """How many samples an input of this shape has."""
        if len(shape) != len(place.shape) + 1 or shape[1:] != place.shape:
            sizes = "".join(f", {size}" for size in place.shape)
            raise BadRequest(f"Input {place.name!r} has the shape {_short(shape)}; expected [n{sizes}] for n samples.")
        if not 1 <= shape[0] <= self.most:
            raise BadRequest(
                f"Input {place.name!r} has the shape {_short(shape)}, of {_short(shape[0])} samples; expected 1 to "
                f"{self.most} in a request."
            )
        return shape[0]

    def _explain_input(self, item: _Input, place: _InputPlace | None) -> str:
        """Why an input is none of this model, or not as it should be."""
        if place is None:
            return f"There is no input {item.name[:_SHOWN]!r}; expected {', '.join(map(repr, self._by_name))}."
        if item.datatype != place.datatype:
            return f"Input {place.name!r} was sent as {item.datatype[:_SHOWN]!r}; expected {place.datatype}."
        return f"Input {place.name!r} was sent twice; expected once."


class _InputPlace:
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

    def pack(self, data: msgspec.Raw | msgspec.UnsetType, count: int) -> bytes:
        """Values of so many samples, as a slab has them. Raises BadRequest."""
        if data is msgspec.UNSET:
            raise BadRequest(f"Input {self.name!r} has no data; expected data, or binary_data_size.")
        if not self._letter:
            raise BadRequest(
                f"Input {self.name!r} is {self.datatype}, which JSON cannot carry; send it as binary, with "
                "binary_data_size."
            )
        try:
            values = self._flat.decode(data)
        except msgspec.ValidationError as error:
            values = self._flatten(data, count, error)
        except _NOT_DECODED as error:
            raise BadRequest(_explain(error)) from None
        if len(values) != count * self._size:
            raise BadRequest(
                f"Input {self.name!r} has {len(values)} values; expected {count * self._size} for its shape "
                f"{[count, *self.shape]}."
            )
        try:
            return self._one.pack(*values) if count == 1 else struct.pack(f"={len(values)}{self._letter}", *values)
        except (struct.error, OverflowError):
            raise BadRequest(self._explain_range(values)) from None

    def take(
        self, item: _Input, parameters: _InputParameters, rest: bytes | memoryview, at: int, count: int
    ) -> tuple[bytes | memoryview, int]:
        """Values of so many samples, and how many bytes of those that follow the JSON they are. Raises BadRequest."""
        size = parameters.binary_data_size
        if parameters.shared_memory_region is not None:
            raise BadRequest(f"Input {self.name!r} lies in shared memory, which is not supported; send its data.")
        if size is None:
            return self.pack(item.data, count), 0
        if item.data is not msgspec.UNSET:
            raise BadRequest(f"Input {self.name!r} has both data and binary_data_size; expected one of them.")
        if size != count * self.sample_bytes:
            raise BadRequest(
                f"Input {self.name!r} has a binary_data_size of {_short(size)}; expected {count * self.sample_bytes} "
                f"for {self.datatype} of its shape {[count, *self.shape]}."
            )
        value = rest[at : at + size]
        if len(value) != size:
            raise BadRequest(
                f"Input {self.name!r} has {size} bytes, of which {len(value)} follow the JSON; expected all of them, "
                "and Inference-Header-Content-Length with the length of the JSON."
            )
        if self.datatype == "BOOL" and np.frombuffer(value, np.uint8).max(initial=0) > 1:
            raise BadRequest(f"Input {self.name!r} is BOOL and has bytes that are neither 0 nor 1; expected these.")
        return value, size

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
        except _NOT_DECODED as wrong:
            raise BadRequest(_explain(wrong)) from None
        sizes = [count, *self.shape]
        level: list[Any] = [values]
        for size in sizes:
            if any(len(part) != size for part in level):
                raise BadRequest(f"Input {self.name!r} has nested data that are not of its shape {sizes}; expected so.")
            level = list(chain.from_iterable(level))
        return level

    def _explain_range(self, values: list[Any]) -> str:
        for value in values:
            try:
                struct.pack(f"={self._letter}", value)
            except (struct.error, OverflowError):
                return f"Input {self.name!r} has the value {_short(value)}, which is none of {self.datatype}."
        return f"Input {self.name!r} has values that are none of {self.datatype}."


class _OutputPlace:
    """An output, and where it lies in each slot."""

    def __init__(self, spec: TensorSpec, offset: int, rows: NDArray[np.uint8], values: NDArray[Any]) -> None:
        self.name, self.datatype, self.offset, self.sample_bytes = spec.name, spec.datatype, offset, spec.num_bytes
        self.can_be_json = spec.datatype in _LETTERS
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


def _explain(error: Exception) -> str:
    """Why something could not be decoded."""
    if isinstance(error, msgspec.ValidationError):
        return f"The request is none of the Open Inference Protocol: {str(error)[: 4 * _SHOWN]}."
    if isinstance(error, RecursionError):
        return "The request's JSON is nested too deeply; expected data that are nested as their shape is, or flat."
    return f"The request is not JSON: {str(error)[: 4 * _SHOWN]}."


def _short(value: Any) -> str:
    """A value of a stranger, not too long."""
    try:
        text = str(value)
    except ValueError:  # an integer of thousands of digits
        return "an endless number"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
