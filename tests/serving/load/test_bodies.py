"""Requests as bytes: what a server of its own makes of them, in JSON and in binary data."""

import numpy as np
import pytest

from meshwright.serving.load import ModelSignature, Target, draw_inputs
from meshwright.serving.load.bodies import build_requests
from meshwright.serving.load.responses import TensorMetadata
from meshwright.spec import ServingError
from tests.serving.load.stub import FORMATS, Request

TARGET = Target(host="127.0.0.1", port=80)


def model(*tensors):
    inputs = tuple(TensorMetadata(name=f"x{n}", datatype=kind, shape=shape) for n, (kind, shape) in enumerate(tensors))
    return ModelSignature(name="a b", inputs=inputs, outputs=())


def read(request):
    head, _, body = bytes(request.content).partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    method, path, version = first.split(" ")
    headers = dict(line.split(": ", 1) for line in lines)
    assert (method, version, headers["Content-Length"]) == ("POST", "HTTP/1.1", str(len(body)))
    return Request(0, path, {name.lower(): value for name, value in headers.items()}, body)


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("datatype", [*FORMATS, "BF16", "BYTES"])
def test_every_datatype_is_read_as_it_was_drawn(datatype, binary):
    facts = model((datatype, (-1, 2, 3)), ("FP32", (-1,)))
    (requests,) = build_requests(TARGET, [facts], [{"timeout": 50_000}], rows=5, binary=binary, seed=3)
    for number, made in enumerate(requests):
        request = read(made)
        assert request.path == "/v2/models/a%20b/infer"
        drawn = draw_inputs(facts, 5, seed=3, number=number)
        assert [(tensor["shape"], tensor["datatype"]) for tensor in request.document["inputs"]] == [
            ([5, 2, 3], datatype), ([5], "FP32"),
        ]  # fmt: skip
        for name, values in request.values.items():
            kind = drawn[name].dtype
            assert (np.array(values, dtype=kind) == drawn[name].ravel()).all()
        assert request.document["parameters"]["timeout"] == 50_000
        assert request.document["parameters"].get("binary_data_output", False) is binary
    assert len({bytes(made.content) for made in requests}) > 1


def test_an_id_is_written_into_the_bytes():
    (requests,) = build_requests(TARGET, [model(("FP32", (-1, 2)))], [{}])
    made = requests[0]
    made.content[made.id_place : made.id_place + 10] = b"0000000042"
    assert read(made).document["id"] == "0000000042"


@pytest.mark.parametrize("binary", [False, True])
def test_what_is_left_of_a_timeout_is_written_into_the_bytes(binary):
    (requests,) = build_requests(TARGET, [model(("FP32", (-1, 2)))], [{"timeout": 50_000}], binary=binary)
    made = requests[0]
    length = len(made.content)
    for late_ns, left in ((0, 50_000), (1_999_000, 48_001), (49_999_999, 1), (10**12, 1), (7_000, 49_993)):
        made.tell_timeout(late_ns)
        assert read(made).document["parameters"]["timeout"] == left
        assert len(made.content) == length
    made, _ = build_requests(TARGET, [model(("FP32", (-1, 2)))] * 2, [{}, {}])
    before = bytes(made[0].content)
    made[0].tell_timeout(5_000)
    assert made[0].content == before


@pytest.mark.long
def test_large_bodies_are_fewer():
    facts = model(("FP32", (-1, 1_000_000)))
    count = [len(build_requests(TARGET, [facts] * copies, [{}] * copies, rows=4, binary=True)[0]) for copies in (1, 20)]
    assert count == [8, 3]


@pytest.mark.parametrize(
    ("tensor", "rows", "message"),
    [
        (("FP32", (3, 4)), 2, "Leave --rows out"),
        (("COMPLEX", (-1,)), 1, "datatype 'COMPLEX'"),
        (("FP32", (-1, 10**9)), 1, "at most"),
    ],
)
def test_inputs_that_cannot_be_made(tensor, rows, message):
    with pytest.raises(ServingError, match=message):
        build_requests(TARGET, [model(tensor)], [{}], rows=rows)


def test_open_sizes_that_are_not_the_batch():
    drawn = draw_inputs(model(("INT64", (-1, -1)), ("INT64", (3,))), 1)
    assert [values.shape for values in drawn.values()] == [(1, 16), (3,)]
