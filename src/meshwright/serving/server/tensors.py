"""Convert requests and answers of the Open Inference Protocol (version 2) between bytes and slots of a slab; no I/O.

A request is JSON, or JSON followed by tensors (the "binary tensor data" extension: the client states the length of the
JSON, and the number of bytes of each input that follows). Each input has a shape [n, *shape of one sample], with the
same n for all inputs, and so have the outputs. `Codec.decode` checks all of this and returns a `ParsedRequest`, or
raises `BadRequest` with a message for the client. `Codec.write` copies the values into slots, and `Codec.encode` makes
an answer from the slots.

Choices where the protocol leaves room:

- Data in JSON are flat, or nested exactly as the shape is. Integers have no fraction and must fit into their datatype;
  booleans are true and false. FP16 and BF16 are binary only, in both directions.
- JSON has neither NaN nor infinity. A request with them is refused. An output with them cannot be sent as JSON (a null,
  or text, would break clients unexpectedly): `NotFinite` says to request it as binary.
- Unknown parameters and members are ignored. Known ones that would change the answer and are not supported
  (``shared_memory_region``, ``classification``, ``sequence_id``) are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import numpy as np

from meshwright.serving.server.values import (
    MOST_CHARACTERS,
    NOT_DECODED,
    SHOWN,
    BadRequest,
    Input,
    InputPlace,
    OutputPlace,
    explain,
    shorten,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshwright.serving.server.gate import ModelFacts

# Most samples of one request; more should be several requests, which also wait less for each other.
MOST_SAMPLES = 1024


class OutputParameters(msgspec.Struct, gc=False):
    """The parameters of a requested output, as in the protocol."""

    binary_data: bool | None = None
    classification: int | None = None
    shared_memory_region: str | None = None


class RequestedOutput(msgspec.Struct, gc=False):
    """An output that a request asks for, by name."""

    name: str
    parameters: OutputParameters | None = None


class Parameters(msgspec.Struct, gc=False):
    """The parameters of a request; ``timeout`` is in microseconds, ``priority`` 1 is the most important."""

    binary_data_output: bool = False
    timeout: int | None = None
    priority: int | None = None
    sequence_id: int | str | None = None


class WireRequest(msgspec.Struct, gc=False):
    """A request as its JSON contains it, before it is checked against a model."""

    inputs: list[Input]
    id: str | None = None
    outputs: list[RequestedOutput] | None = None
    parameters: Parameters | None = None


class _Named(Protocol):
    """The fields of an input that all protocols have."""

    name: str
    datatype: str
    shape: Any


_Item = TypeVar("_Item", bound=_Named)
# Priorities start at 1; a request without one is treated as having the second of these.
LEAST_IMPORTANT, _UNSAID = 7, 4
_REQUESTS = msgspec.json.Decoder(WireRequest)


class ParsedRequest:
    """A parsed request of ``count`` samples.

    ``values`` are the bytes of each input; ``outputs`` are pairs of a wanted output and whether it is sent as binary.
    ``timeout_us`` is None if the request has no timeout; ``level`` is its priority (`policies.ordering`).
    """

    id: str | None = None
    timeout_us: int | None = None
    level: int = 0

    def __init__(self, count: int, values: Sequence[Any], outputs: Sequence[tuple[OutputPlace, bool]]) -> None:
        self.count, self.values, self.outputs = count, values, outputs


class Codec:
    """Reads requests and writes answers of one model."""

    def __init__(self, model: ModelFacts) -> None:
        slab = model.slab
        names, size = slab.slots.dtype.fields, slab.slots.itemsize
        assert names is not None
        cells = slab.slots.view(np.uint8)
        rows = cells.reshape(len(slab), size)
        self._memory, self._slot_bytes = cells.data, size
        self._inputs = [InputPlace(spec, place, names[f"i{place}"][1], rows) for place, spec in enumerate(model.inputs)]
        outputs = [
            OutputPlace(spec, names[f"o{place}"][1], rows, slab.outputs[place])
            for place, spec in enumerate(model.outputs)
        ]
        self._by_name = {place.name: place for place in self._inputs}
        self._outputs = {place.name: place for place in outputs}
        self._all_as_json = [(place, False) for place in outputs]
        self._all_as_binary = [(place, True) for place in outputs]
        self._all_can_be_json = all(place.can_be_json for place in outputs)
        self.most = min(MOST_SAMPLES, len(slab))
        # Approximate bytes of an answer for one sample.
        self.answer_bytes = sum(place.sample_bytes + place.size * MOST_CHARACTERS for place in outputs)
        name, version = (msgspec.json.encode(each) for each in (model.name, model.version))
        self._begin = b'{"model_name":' + name + b',"model_version":' + version + b',"outputs":['
        # The text before the data of each output in the most common answer: one sample, all as JSON.
        self._ones = [
            (b"%b%b%b" % (b"}," if number else self._begin, place.head_of_one, b'"data":'), place)
            for number, place in enumerate(outputs)
        ]

    def decode(self, body: bytes, json_bytes: int | None = None) -> ParsedRequest:
        """Parse a request; ``json_bytes`` is the length of the JSON if tensors follow it. Raises BadRequest."""
        text = body if json_bytes is None else memoryview(body)[:json_bytes]
        if json_bytes is not None and json_bytes > len(body):
            raise BadRequest(
                f"The request is not JSON of {json_bytes} bytes, as Inference-Header-Content-Length says: the body has "
                f"{len(body)} bytes. Expected the length of the JSON at its start."
            )
        try:
            request = _REQUESTS.decode(text)
        except NOT_DECODED as error:
            raise BadRequest(explain(error, text)) from None
        if json_bytes is None:
            count, values = self.read_inputs(request.inputs, InputPlace.pack)
        else:
            count, values = self._read_binary(request.inputs, memoryview(body)[json_bytes:])
        if request.parameters is None and request.outputs is None and request.id is None and self._all_can_be_json:
            return ParsedRequest(count, values, self._all_as_json)
        return self.asked(request, count, values)

    def read_inputs(
        self, items: Sequence[_Item], take: Callable[[InputPlace, _Item, int], Any]
    ) -> tuple[int, list[Any]]:
        """Return the number of samples, and the bytes of each input.

        ``take(input, item, number of samples)`` returns the bytes of an item of the request. Raises BadRequest.
        """
        values: list[Any] = [None] * len(self._inputs)
        count = 0
        for item in items:
            place = self._by_name.get(item.name)
            if place is None or values[place.place] is not None or item.datatype != place.datatype:
                raise BadRequest(self._explain_input(item, place))
            number = 1 if item.shape == place.shape_of_one else self._count(place, item.shape)
            if count != number:
                if count:
                    raise BadRequest(
                        f"Input {place.name!r} has {number} samples, and an earlier input has {count}; expected the "
                        "same number."
                    )
                count = number
            values[place.place] = take(place, item, number)
        if len(items) != len(values):
            missing = [place.name for place, value in zip(self._inputs, values, strict=True) if value is None]
            raise BadRequest(f"Inputs are missing: {', '.join(map(repr, missing))}.")
        return count, values

    def write(self, asked: ParsedRequest, slots: list[int]) -> None:
        """Write the values of a request into its slots."""
        if asked.count == 1:
            begin, memory = slots[0] * self._slot_bytes, self._memory
            for place in self._inputs:
                at = begin + place.offset
                memory[at : at + place.sample_bytes] = asked.values[place.place]
        else:
            for place, value in zip(self._inputs, asked.values, strict=True):
                place.rows[slots] = np.frombuffer(value, np.uint8).reshape(asked.count, place.sample_bytes)

    def encode(self, asked: ParsedRequest, slots: list[int]) -> tuple[bytes, int | None]:
        """Return an answer's body, and the length of its JSON if tensors follow it, else None. Raises NotFinite."""
        if asked.count == 1 and asked.outputs is self._all_as_json and asked.id is None:
            texts: list[bytes] = []
            for before, place in self._ones:
                texts += (before, place.data(slots))
            texts.append(b"}]}")
            return b"".join(texts), None
        pieces, blocks = [self._begin], []
        for place, is_binary in asked.outputs:
            pieces.append(place.head_of_one if asked.count == 1 else place.head(asked.count))
            if is_binary:
                pieces.append(b'"parameters":{"binary_data_size":%d}}' % (asked.count * place.sample_bytes))
                blocks.append(self.block(place, slots))
            else:
                pieces += (b'"data":', place.data(slots), b"}")
            pieces.append(b",")
        pieces[-1] = b"]}" if asked.id is None else b'],"id":' + msgspec.json.encode(asked.id) + b"}"
        if not blocks:
            return b"".join(pieces), None
        text = b"".join(pieces)
        return b"".join((text, *blocks)), len(text)

    def block(self, place: OutputPlace, slots: list[int]) -> Any:
        """Return the bytes of an output's values in these slots."""
        if len(slots) == 1:
            at = slots[0] * self._slot_bytes + place.offset
            return self._memory[at : at + place.sample_bytes]
        return place.rows[slots].tobytes()

    def asked(self, request: WireRequest, count: int, values: list[Any]) -> ParsedRequest:
        """Return the parsed request, with outputs, timeout and priority as it asks for. Raises BadRequest."""
        parameters = request.parameters
        as_binary = parameters is not None and parameters.binary_data_output
        outputs = self._all_as_binary if as_binary else self._all_as_json
        if request.outputs:
            outputs = self._chosen(request.outputs, as_binary)
        elif not as_binary and not self._all_can_be_json:
            outputs = self._chosen([RequestedOutput(name) for name in self._outputs], False)
        asked = ParsedRequest(count, values, outputs)
        if request.id is not None:
            asked.id = request.id
        if parameters is not None:
            timeout, priority = parameters.timeout, parameters.priority
            if timeout is not None and timeout < 1:
                raise BadRequest(f"The parameter timeout is {timeout}; expected microseconds, at least 1.")
            if priority is not None and not 0 <= priority < 2**64:
                raise BadRequest(f"The parameter priority is {priority}; expected a 64-bit integer of at least 0.")
            if parameters.sequence_id:
                raise BadRequest("The parameter sequence_id was given, but models are stateless here. Leave it out.")
            asked.timeout_us = timeout
            if priority:
                asked.level = min(priority, LEAST_IMPORTANT) - _UNSAID
        return asked

    def _chosen(self, items: Sequence[RequestedOutput], as_binary: bool) -> list[tuple[OutputPlace, bool]]:
        chosen: dict[str, tuple[OutputPlace, bool]] = {}
        for item in items:
            place, parameters = self._outputs.get(item.name), item.parameters
            if place is None:
                raise BadRequest(
                    f"There is no output {item.name[:SHOWN]!r}; expected one of {', '.join(map(repr, self._outputs))}."
                )
            if item.name in chosen:
                raise BadRequest(f"Output {item.name!r} is requested twice; expected once.")
            is_binary = as_binary
            if parameters is not None:
                if parameters.classification is not None or parameters.shared_memory_region is not None:
                    raise BadRequest(
                        f"Output {item.name!r} is requested with classification or shared_memory_region, which are not "
                        "supported; leave them out."
                    )
                is_binary = as_binary if parameters.binary_data is None else parameters.binary_data
            if not is_binary and not place.can_be_json:
                raise BadRequest(
                    f"Output {place.name!r} is {place.datatype}, which JSON cannot carry; request it with the "
                    "parameter binary_data, or for all with binary_data_output."
                )
            chosen[item.name] = (place, is_binary)
        return list(chosen.values())

    def _read_binary(self, items: Sequence[Input], rest: memoryview) -> tuple[int, list[Any]]:
        """Read inputs of which some follow the JSON, one after the other."""
        at = 0

        def take(place: InputPlace, item: Input, count: int) -> Any:
            nonlocal at
            if item.parameters is None:
                return place.pack(item, count)
            value, size = place.take(item, item.parameters, rest, at, count)
            at += size
            return value

        count, values = self.read_inputs(items, take)
        if at != len(rest):
            raise BadRequest(
                f"{len(rest)} bytes follow the JSON, but the inputs' binary_data_size sum to {at}; expected this sum."
            )
        return count, values

    def _count(self, place: InputPlace, shape: Sequence[int]) -> int:
        """Return the number of samples in an input of this shape. Raises BadRequest."""
        if len(shape) != len(place.shape) + 1 or shape[1:] != place.shape:
            sizes = "".join(f", {size}" for size in place.shape)
            raise BadRequest(f"Input {place.name!r} has the shape {shorten(shape)}; expected [n{sizes}] for n samples.")
        if not 1 <= shape[0] <= self.most:
            raise BadRequest(
                f"Input {place.name!r} has the shape {shorten(shape)}, of {shorten(shape[0])} samples; expected 1 to "
                f"{self.most} in a request."
            )
        return shape[0]

    def _explain_input(self, item: _Item, place: InputPlace | None) -> str:
        """Return why an input does not match the model."""
        if place is None:
            return f"There is no input {item.name[:SHOWN]!r}; expected {', '.join(map(repr, self._by_name))}."
        if item.datatype != place.datatype:
            return f"Input {place.name!r} was sent as {item.datatype[:SHOWN]!r}; expected {place.datatype}."
        return f"Input {place.name!r} was sent twice; expected once."
