"""Requests as bytes, made in advance: to send one, only its id and timeout are written into the bytes.

    POST /v2/models/NAME/infer
    {"id": "0000000042", "parameters": {"timeout": 50000}, "inputs": [{"name", "shape", "datatype", "data"}, ...]}

``timeout`` (Triton's, in microseconds) is the time that is left until the deadline when the request is sent. The
deadline counts from the moment at which the request is due to be sent, so that a late sender leaves the server less
time. In binary requests (Triton's binary tensor data extension) the values follow the JSON, whose length a header
states, and the answer is requested in the same format. Values are drawn from (seed, model, number of the body).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.serving.datatypes import NUMPY_TYPES
from meshwright.serving.load.responses import TensorMetadata
from meshwright.serving.load.target import ModelSignature, Target
from meshwright.spec import ServingError, format_bytes

# Digits of an id, which is written into existing bytes.
ID_DIGITS = 10
_NO_ID = "0" * ID_DIGITS
# Width of a timeout, padded with spaces, so that it can be overwritten.
TIMEOUT_PLACES = 11
# Different bodies of a model, and the memory (bytes) for those of all models.
_NUM_BODIES = 8
_MOST_BYTES = 2**30
_MOST_BODY_BYTES = 2**28
# Used for an open size other than the batch, such as the number of tokens.
_OPEN_SIZE = 16
# Integers are below this: ids of tokens, classes, and types of segments, of which some models have only two.
_MOST_WHOLE = 2
_WHOLE = {name: kind for name, kind in NUMPY_TYPES.items() if name.startswith(("INT", "UINT"))}
_REAL = {"FP16": np.float16, "BF16": np.float32, "FP32": np.float32, "FP64": np.float64}


class RequestBytes:
    """A request as bytes, head and body.

    Its id starts at the byte ``id_place``, its timeout at ``timeout_place`` (0: no timeout). ``timeout_us`` is the
    timeout of a request that is sent exactly when it is due (`tell_timeout`).
    """

    __slots__ = ("content", "id_place", "timeout_place", "timeout_us")

    def __init__(self, content: bytearray, id_place: int, timeout_place: int = 0, timeout_us: int = 0) -> None:
        self.content, self.id_place = content, id_place
        self.timeout_place, self.timeout_us = timeout_place, timeout_us

    def __reduce__(self) -> tuple[Any, ...]:
        return RequestBytes, (self.content, self.id_place, self.timeout_place, self.timeout_us)

    def tell_timeout(self, late_ns: int) -> None:
        """Write the timeout of a request that is sent ``late_ns`` after it was due: what is left, at least 1 us."""
        if self.timeout_place:
            left = max(self.timeout_us - late_ns // 1000, 1)
            self.content[self.timeout_place : self.timeout_place + TIMEOUT_PLACES] = b"%*d" % (TIMEOUT_PLACES, left)


def build_requests(
    target: Target,
    models: Sequence[ModelSignature],
    parameters: Sequence[Mapping[str, int]],
    *,
    rows: int = 1,
    binary: bool = False,
    seed: int = 0,
) -> list[list[RequestBytes]]:
    """Return some requests for each model, which differ in their values.

    ``parameters`` of each model's requests are sent in them; ``rows`` is the number of samples in a request. Raises
    ServingError for inputs that cannot be made.
    """
    requests: list[list[RequestBytes]] = []
    num_bytes = 0
    for place, (model, said) in enumerate(zip(models, parameters, strict=True)):
        made: list[RequestBytes] = []
        share = _MOST_BYTES // len(models)
        while len(made) < _NUM_BODIES and (not made or (len(made) + 1) * len(made[0].content) <= share):
            values = draw_inputs(model, rows, seed=seed, place=place, number=len(made))
            made.append(_build(target, model, values, said, binary))
        num_bytes += sum(len(request.content) for request in made)
        if num_bytes > 2 * _MOST_BYTES:
            raise ServingError(
                f"Requests for {len(models)} models of {rows} samples take more than {format_bytes(2 * _MOST_BYTES)}. "
                "Ask for fewer samples in a request, or fewer models."
            )
        requests.append(made)
    return requests


def draw_inputs(
    model: ModelSignature, rows: int, *, seed: int = 0, place: int = 0, number: int = 0
) -> dict[str, NDArray[Any]]:
    """Return the values of the body with a given ``number``, by input; ``place`` is the index of the model.

    Real numbers are normally distributed, with four decimals, so that JSON and binary requests have the same values.
    Raises ServingError for inputs that cannot be made.
    """
    rng = np.random.default_rng([seed, place, number])
    return {tensor.name: _draw(model.name, tensor, rows, rng) for tensor in model.inputs}


def _draw(model: str, tensor: TensorMetadata, rows: int, rng: np.random.Generator) -> NDArray[Any]:
    shape = input_shape(model, tensor, rows)
    if math.prod(shape) * 8 > _MOST_BODY_BYTES:
        raise ServingError(
            f"Input {tensor.name!r} of model {model!r} has shape {list(shape)}; expected at most "
            f"{_MOST_BODY_BYTES // 8} values. Ask for fewer samples in a request."
        )
    if tensor.datatype == "BOOL":
        return rng.random(shape) < 0.5
    if tensor.datatype in _WHOLE:
        return rng.integers(0, _MOST_WHOLE, shape).astype(_WHOLE[tensor.datatype])
    if tensor.datatype in _REAL:
        values = rng.standard_normal(shape).round(4).astype(_REAL[tensor.datatype])
        return _to_bfloat16(values) if tensor.datatype == "BF16" else values
    if tensor.datatype == "BYTES":
        return rng.integers(10**7, 10**8, shape).astype(str).astype(object)
    raise ServingError(
        f"Input {tensor.name!r} of model {model!r} has datatype {tensor.datatype!r}; expected BOOL, BYTES, BF16 or one "
        "of numbers (INT64, FP32, ...). Requests for it cannot be generated."
    )


def input_shape(model: str, tensor: TensorMetadata, rows: int) -> tuple[int, ...]:
    """Return the shape of an input of ``rows`` samples; other open sizes (-1) become 16.

    Raises ServingError for several rows if the input has no batch dim.
    """
    if not tensor.shape or tensor.shape[0] != -1:
        if rows != 1:
            raise ServingError(
                f"Input {tensor.name!r} of model {model!r} has shape {list(tensor.shape)}, that of one sample, but "
                f"--rows is {rows}. Leave --rows out."
            )
        return tensor.shape
    return (rows, *(_OPEN_SIZE if size == -1 else size for size in tensor.shape[1:]))


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Truncate to bfloat16's precision, so that JSON and binary requests have the same values."""
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def _build(
    target: Target, model: ModelSignature, values: dict[str, NDArray[Any]], said: Mapping[str, int], binary: bool
) -> RequestBytes:
    inputs: list[dict[str, Any]] = []
    parts = []
    for tensor in model.inputs:
        drawn = values[tensor.name]
        entry: dict[str, Any] = {"name": tensor.name, "shape": list(drawn.shape), "datatype": tensor.datatype}
        if binary:
            parts.append(_encode(drawn, tensor.datatype))
            entry["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            # The text of a value is the shortest that is read as the same number.
            entry["data"] = json.loads(f"[{','.join(map(str, drawn.ravel()))}]") if _is_real(drawn) else _listed(drawn)
        inputs.append(entry)
    parameters = {**said, **({"binary_data_output": True} if binary else {})}
    document = {"id": _NO_ID, **({"parameters": parameters} if parameters else {}), "inputs": inputs}
    text = json.dumps(document, separators=(",", ":")).encode()
    given, timeout = b'"timeout":%d' % said.get("timeout", 0), b'"timeout":'
    if "timeout" in said:
        text = text.replace(given, timeout + b"%*d" % (TIMEOUT_PLACES, said["timeout"]), 1)
    body = b"".join((text, *parts))
    headers = {
        **target.headers,
        "Content-Type": "application/octet-stream" if binary else "application/json",
        **({"Inference-Header-Content-Length": str(len(text))} if binary else {}),
        "Content-Length": str(len(body)),
    }
    lines = [f"POST {target.model_path(model.name)}/infer HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
    head = "\r\n".join([*lines, "", ""]).encode()
    timeout_place = len(head) + body.index(timeout) + len(timeout) if "timeout" in said else 0
    id_place = len(head) + body.index(_NO_ID.encode())
    return RequestBytes(bytearray(head + body), id_place, timeout_place, said.get("timeout", 0))


def _is_real(values: NDArray[Any]) -> bool:
    return values.dtype.kind == "f"


def _listed(values: NDArray[Any]) -> list[Any]:
    listed: list[Any] = values.ravel().tolist()
    return listed


def _encode(values: NDArray[Any], datatype: str) -> bytes:
    if datatype == "BYTES":
        texts = [text.encode() for text in values.ravel()]
        return b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    if datatype == "BF16":
        return (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    return values.astype(values.dtype.newbyteorder("<")).tobytes()
