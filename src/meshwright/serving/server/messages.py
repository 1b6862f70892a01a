"""Messages of the Open Inference Protocol over gRPC: parse requests, and make answers from slots.

Their classes are built from inference.pb, the compiled inference.proto (`scripts/renew_messages.py`), in a separate
descriptor pool: other libraries, such as Triton's client, use the same names, and both can be in one process.

Input values arrive as bytes (``raw_input_contents``, one entry for each input) or as numbers (``contents`` of each
input); FP16 and BF16 arrive as bytes only. Output values are sent as bytes, as Triton does.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from meshwright.serving.server.tensors import OutputParameters, Parameters, ParsedRequest, RequestedOutput, WireRequest
from meshwright.serving.server.values import BadRequest, InputPlace, explain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwright.serving.server.front import FrontendModel

SERVICE_NAME = "inference.GRPCInferenceService"
_POOL = DescriptorPool()
for _file in FileDescriptorSet.FromString(Path(__file__).with_name("inference.pb").read_bytes()).file:
    _POOL.Add(_file)
SERVICE = _POOL.FindServiceByName(SERVICE_NAME)
# The field with the numbers of a datatype.
_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}


def classes_of(method: str) -> tuple[Any, Any]:
    """Return the message classes of a method's request and response."""
    about = SERVICE.methods_by_name[method]
    return GetMessageClass(about.input_type), GetMessageClass(about.output_type)


_INFER_REQUEST, _INFER_RESPONSE = classes_of("ModelInfer")


def read_message(kind: Any, data: bytes) -> Any:
    """Parse ``data`` as a message of the class ``kind``. Raises BadRequest."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise BadRequest(
            f"The message is not a valid {kind.DESCRIPTOR.full_name} of the Open Inference Protocol; expected one."
        ) from None


def read_infer(data: bytes) -> Any:
    """Parse an inference message; `asked_of` interprets it. Raises BadRequest."""
    return read_message(_INFER_REQUEST, data)


def asked_of(served: FrontendModel, request: Any) -> ParsedRequest:
    """Return the parsed content of an inference request to a model. Raises BadRequest."""
    count, values = served.codec.read_inputs(request.inputs, _taker_of(request))
    try:
        wanted = WireRequest(
            inputs=[],
            id=request.id or None,
            outputs=[_output_of(output) for output in request.outputs] or None,
            parameters=msgspec.convert(_plain(request.parameters) | {"binary_data_output": True}, Parameters),
        )
    except msgspec.ValidationError as error:
        raise BadRequest(explain(error)) from None
    return served.codec.asked(wanted, count, values)


def answer_of(served: FrontendModel, asked: ParsedRequest, slots: list[int]) -> bytes:
    """Return the serialized answer of a request, whose outputs are in ``slots``."""
    model = served.model
    answer = _INFER_RESPONSE(model_name=model.name, model_version=model.version, id=asked.id or "")
    for place, _ in asked.outputs:
        answer.outputs.add(name=place.name, datatype=place.datatype, shape=[asked.count, *place.shape])
        answer.raw_output_contents.append(bytes(served.codec.block(place, slots)))
    data: bytes = answer.SerializeToString()
    return data


def _taker_of(request: Any) -> Any:
    """Return a function that takes the values of one input after the other."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise BadRequest(
            f"raw_input_contents has {len(raw)} entries; expected {len(request.inputs)}, one for each input."
        )
    rest = iter(raw)

    def take(place: InputPlace, item: Any, count: int) -> bytes:
        if "shared_memory_region" in item.parameters:
            raise place.lies_elsewhere()
        if not raw:
            return _numbers_of(place, item, count)
        if item.HasField("contents"):
            raise BadRequest(f"Input {place.name!r} has both contents and raw_input_contents; expected one of them.")
        return place.take_raw(next(rest), count)

    return take


def _numbers_of(place: InputPlace, item: Any, count: int) -> bytes:
    field = _CONTENTS.get(place.datatype)
    if field is None:
        raise BadRequest(
            f"Input {place.name!r} is {place.datatype}, which contents cannot carry; send it in raw_input_contents."
        )
    others = [about.name for about, _ in item.contents.ListFields() if about.name != field]
    if others:
        raise BadRequest(f"Input {place.name!r} is {place.datatype} and has {others[0]}; expected {field}.")
    return place.pack_values(getattr(item.contents, field), count)


def _output_of(output: Any) -> RequestedOutput:
    parameters = msgspec.convert(_plain(output.parameters) | {"binary_data": None}, OutputParameters)
    return RequestedOutput(output.name, parameters)


def _plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters in their JSON form."""
    kinds = {name: value.WhichOneof("parameter_choice") for name, value in parameters.items()}
    return {name: getattr(parameters[name], kind) for name, kind in kinds.items() if kind is not None}
