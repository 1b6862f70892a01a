"""Requests and answers of the Open Inference Protocol, against numpy and json."""

import contextlib
import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.serving.datatypes import NUMPY_TYPES
from meshwright.serving.server.tensors import Codec
from meshwright.serving.server.values import BadRequest, NotFinite
from meshwright.spec import DATATYPES, Latency, ServedModel, TensorSpec
from meshwright.spec.units import Seconds
from tests.serving.server.fakes import X, Y, copy_inputs, facts, request

IN_JSON = [name for name in DATATYPES if name not in ("FP16", "BF16")]
SHAPES = ((), (3,), (2, 3), (2, 1, 2))
ONCE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


class Ticket:
    def __init__(self, model, slots):
        self.model, self.slots = model, slots


def codec_of(folder, datatype="FP32", shape=(4,)):
    one = TensorSpec(name="x", datatype=datatype, shape=shape)
    model = facts(folder, (one,), (TensorSpec(name="y", datatype=datatype, shape=shape),), tensor_bytes=2**18)
    return model, Codec(model)


def ask(model, codec, body, json_bytes=None):
    asked = codec.decode(body, json_bytes)
    slots = list(range(5, 5 + 2 * asked.count, 2))  # not one after the other
    codec.write(asked, slots)
    copy_inputs(Ticket(model, slots))
    return asked, codec.encode(asked, slots)


def refusal(codec, document, json_bytes=None):
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    with pytest.raises(BadRequest) as caught:
        codec.decode(body, json_bytes)
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert len(sentence) < 1000
    return sentence


def values_of(datatype, size):
    kind = np.dtype(NUMPY_TYPES[datatype])
    if datatype == "BOOL":
        return st.lists(st.booleans(), min_size=size, max_size=size)
    if kind.kind in "iu":
        ends = np.iinfo(kind)
        return st.lists(st.integers(int(ends.min), int(ends.max)), min_size=size, max_size=size)
    floats = st.floats(width=kind.itemsize * 8, allow_nan=False, allow_infinity=False)
    return st.lists(floats, min_size=size, max_size=size)


@ONCE
@pytest.mark.parametrize("datatype", IN_JSON)
@given(data=st.data(), shape=st.sampled_from(SHAPES), count=st.integers(1, 3), is_nested=st.booleans())
def test_values_come_back_as_they_went(tmp_path_factory, datatype, data, shape, count, is_nested):
    model, codec = codec_of(tmp_path_factory.mktemp("slab"), datatype, shape)
    size = int(np.prod(shape, dtype=int))
    values = data.draw(values_of(datatype, count * size))
    kind = NUMPY_TYPES[datatype]
    if is_nested:
        values = np.array(values, kind).reshape(count, *shape).tolist()
    item = {"name": "x", "shape": [count, *shape], "datatype": datatype, "data": values}
    _, (body, json_bytes) = ask(model, codec, json.dumps({"inputs": [item], "id": 'é"'}).encode())
    assert json_bytes is None
    answer = json.loads(body)
    (output,) = answer.pop("outputs")
    assert answer == {"model_name": "m", "model_version": "1", "id": 'é"'}
    given_back = np.array(output.pop("data"), kind).reshape(count, *shape)
    assert output == {"name": "y", "datatype": datatype, "shape": [count, *shape]}
    assert given_back.tobytes() == np.array(values, kind).tobytes()


@ONCE
@pytest.mark.parametrize("datatype", DATATYPES)
@given(data=st.data(), shape=st.sampled_from(SHAPES), count=st.integers(1, 3))
def test_binary_tensors_come_back_bit_by_bit(tmp_path_factory, datatype, data, shape, count):
    model, codec = codec_of(tmp_path_factory.mktemp("slab"), datatype, shape)
    length = count * int(np.prod(shape, dtype=int)) * DATATYPES[datatype]
    if datatype == "BOOL":
        block = bytes(data.draw(st.lists(st.integers(0, 1), min_size=length, max_size=length)))
    else:
        block = data.draw(st.binary(min_size=length, max_size=length))
    parameters = {"binary_data_size": length}
    item = {"name": "x", "shape": [count, *shape], "datatype": datatype, "parameters": parameters}
    text = json.dumps({"inputs": [item], "parameters": {"binary_data_output": True}}).encode()
    _, (body, json_bytes) = ask(model, codec, text + block, len(text))
    (output,) = json.loads(body[:json_bytes])["outputs"]
    assert output == {"name": "y", "datatype": datatype, "shape": [count, *shape], "parameters": parameters}
    assert body[json_bytes:] == block


def two_of_each(folder):
    inputs = (X, TensorSpec(name="i", datatype="INT8", shape=(2,)))
    outputs = (Y, TensorSpec(name="j", datatype="INT8", shape=(2,)))
    model = facts(folder, inputs, outputs, tensor_bytes=2**16)
    return model, Codec(model)


def test_inputs_in_any_order_and_outputs_as_asked_for(tmp_path):
    model, codec = two_of_each(tmp_path)
    x = {"name": "x", "shape": [2, 4], "datatype": "FP32", "data": [0.5] * 8}
    i = {"name": "i", "shape": [2, 2], "datatype": "INT8", "parameters": {"binary_data_size": 4}}
    outputs = [{"name": "j"}, {"name": "y", "parameters": {"binary_data": True}}]
    text = json.dumps({"inputs": [i, x], "outputs": outputs}).encode()
    _, (body, json_bytes) = ask(model, codec, text + b"\x01\x02\x03\xff", len(text))
    j, y = json.loads(body[:json_bytes])["outputs"]
    assert j == {"name": "j", "datatype": "INT8", "shape": [2, 2], "data": [1, 2, 3, -1]}
    assert y["parameters"] == {"binary_data_size": 32}
    assert body[json_bytes:] == np.full(8, 0.5, np.float32).tobytes()


def test_an_output_says_otherwise_than_all(tmp_path):
    model, codec = two_of_each(tmp_path)
    x = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [0.5] * 4}
    i = {"name": "i", "shape": [1, 2], "datatype": "INT8", "data": [7, 8]}
    whole = {"inputs": [x, i], "parameters": {"binary_data_output": True}}
    _, (body, json_bytes) = ask(model, codec, json.dumps(whole).encode())
    assert [len(body) - json_bytes, len(json.loads(body[:json_bytes])["outputs"])] == [18, 2]
    whole["outputs"] = [{"name": "j", "parameters": {"binary_data": False}}]
    _, (body, json_bytes) = ask(model, codec, json.dumps(whole).encode())
    assert json_bytes is None
    assert json.loads(body)["outputs"][0]["data"] == [7, 8]


def test_what_a_request_says_besides(tmp_path):
    _, codec = codec_of(tmp_path)
    parameters = {"timeout": 5, "priority": 2**64 - 1, "anything": "else", "sequence_id": 0}
    asked = codec.decode(json.dumps(request(id="a", parameters=parameters, more=[1])).encode())
    assert (asked.count, asked.id, asked.timeout_us, asked.level) == (1, "a", 5, 3)
    asked = codec.decode(json.dumps(request(id=None, parameters=None, outputs=None)).encode())
    assert (asked.id, asked.timeout_us, asked.level) == (None, None, 0)


def changed(**more):
    document = request()
    document["inputs"][0] |= more
    return document


DEEP = b'{"inputs":' + b"[" * 100_000


@pytest.mark.parametrize(
    ("document", "told"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"inputs": "\xff"}', ""),
        (b"[]", "Expected `object`, got `array`"),
        ({}, "missing required field `inputs`"),
        ({"inputs": []}, "Inputs are missing: 'x'"),
        ({"inputs": 3}, "Expected `array`"),
        (DEEP, "Expected `object`, got `array`"),
        (b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":' + b"[" * 100_000, "nested too deeply"),
        (b'{"a":' + b"[" * 100_000, "nested too deeply"),
        (request(id=3), "Expected `str | null`, got `int`"),
        (changed(name="z"), "no input 'z'; expected 'x'"),
        (changed(datatype="FP64"), "sent as 'FP64'; expected FP32"),
        (changed(datatype="nonsense" * 99), "expected FP32"),
        (changed(shape=[4]), "the shape [4]; expected [n, 4]"),
        (changed(shape=[]), "the shape []"),
        (changed(shape=[1, 5]), "the shape [1, 5]"),
        (changed(shape=[0, 4]), "0 samples; expected 1 to"),
        (changed(shape=[-1, 4]), "-1 samples"),
        (changed(shape=[2**80, 4]), "samples"),
        (changed(shape=[10**4000, 4]), "samples"),
        (changed(shape=[1025, 4]), "1025 samples; expected 1 to 1024"),
        (changed(shape=[1] * 5000), "the shape [1, 1"),
        (changed(shape=[1.5, 4]), "Expected `int`"),
        (changed(data=[1, 2, 3]), "has 3 values; expected 4"),
        (changed(data=[[1, 2, 3]]), "do not match its shape [1, 4]"),
        (changed(data=[[1, 2], [3, 4]]), "do not match its shape"),
        (changed(data=[[1, 2, 3, 4], 5]), "are not numbers"),
        (changed(data=[[[1, 2, 3, 4]]]), "are not numbers"),
        (changed(data=[1, 2, 3, "4"]), "Expected `float`, got `str`"),
        (changed(data=[1, 2, 3, None]), "got `null`"),
        (changed(data=[1, 2, 3, True]), "got `bool`"),
        (changed(data=3), "are not numbers"),
        (changed(data=None), "are not numbers"),
        (changed(data={}), "are not numbers"),
        (changed(data=[1, 2, 3, 1e39]), "1e+39, which is out of range for FP32"),
        (b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[NaN,1,1,1]}]}', "not JSON"),
        (b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[Infinity,1,1,1]}]}', "not JSON"),
        (b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[1e999,1,1,1]}]}', "out of range"),
        ({"inputs": request()["inputs"] * 2}, "sent twice"),
        ({"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32"}]}, "has no data"),
        (changed(parameters={"binary_data_size": 16}), "both data and binary_data_size"),
        (changed(parameters={"shared_memory_region": "r"}), "shared memory"),
        (changed(parameters={"binary_data_size": "16"}), "Expected `int | null`"),
        (request(outputs=[{"name": "z"}]), "no output 'z'; expected one of 'y'"),
        (request(outputs=[{"name": "y"}, {"name": "y"}]), "requested twice"),
        (request(outputs=[{"name": "y", "parameters": {"classification": 3}}]), "classification"),
        (request(parameters={"timeout": 0}), "timeout is 0"),
        (request(parameters={"timeout": -(10**30)}), "timeout is -1000"),
        (request(parameters={"timeout": "5"}), "Expected `int | null`"),
        (request(parameters={"priority": -1}), "priority is -1"),
        (request(parameters={"priority": 2**64}), "priority is 184"),
        (request(parameters={"sequence_id": 5}), "sequence_id"),
        (request(parameters={"binary_data_output": 1}), "Expected `bool`"),
    ],
)
def test_what_is_wrong_is_told(tmp_path, document, told):
    _, codec = codec_of(tmp_path)
    assert told in refusal(codec, document)


@pytest.mark.parametrize(
    ("datatype", "values", "told"),
    [
        ("INT8", [128], "128, which is out of range for INT8"),
        ("INT8", [-129], "-129, which"),
        ("UINT8", [-1], "-1, which"),
        ("UINT64", [2**64], "which is out of range for UINT64"),
        ("INT64", [2**63], "which is out of range for INT64"),
        ("INT64", [10**1000], "…, which is out of range for INT64"),
        ("INT32", [1.0], "are not integers"),
        ("INT32", [True], "are not integers"),
        ("BOOL", [1], "are not true or false"),
        ("BOOL", ["true"], "are not true or false"),
        ("FP16", [1.0], "FP16, which JSON cannot carry; send it as binary"),
        ("BF16", [1.0], "BF16, which JSON cannot carry"),
    ],
)
def test_values_are_of_their_datatype(tmp_path, datatype, values, told):
    _, codec = codec_of(tmp_path, datatype, ())
    item = {"name": "x", "shape": [1], "datatype": datatype, "data": values}
    assert told in refusal(codec, {"inputs": [item], "parameters": {"binary_data_output": True}})


@pytest.mark.parametrize(
    ("size", "block", "json_bytes", "told"),
    [
        (16, bytes(15), None, "only 15 of them follow the JSON"),
        (16, b"", None, "only 0 of them follow the JSON"),
        (16, bytes(17), None, "17 bytes follow the JSON, but the inputs' binary_data_size sum to 16"),
        (15, bytes(15), None, "binary_data_size of 15; expected 16"),
        (-16, bytes(16), None, "binary_data_size of -16"),
        (2**90, bytes(16), None, "expected 16"),
        (16, bytes(16), 3, "not JSON"),
        (16, bytes(16), 0, "not JSON"),
        (16, bytes(16), 10**9, "not JSON"),
    ],
)
def test_sizes_of_binary_tensors(tmp_path, size, block, json_bytes, told):
    _, codec = codec_of(tmp_path)
    item = {"name": "x", "shape": [1, 4], "datatype": "FP32", "parameters": {"binary_data_size": size}}
    text = json.dumps({"inputs": [item]}).encode()
    assert told in refusal(codec, text + block, len(text) if json_bytes is None else json_bytes)


@pytest.mark.parametrize("is_nested", [False, True])
def test_more_values_than_expected_are_told_without_reading_them(tmp_path, is_nested):
    _, codec = codec_of(tmp_path)
    number = 1_000_000
    data = b"[%s]" % b",".join([b"[1,1,1,1]" if is_nested else b"1,1,1,1"] * (number // 4))
    body = b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":%b}]}' % data
    tracemalloc.start()
    told = refusal(codec, body)
    most_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert told == f"Input 'x' has {number} values; expected 4 for its shape [1, 4]."
    # A list of as many numbers has 8 bytes for each.
    assert most_bytes < 4 * number


@pytest.mark.parametrize("is_nested", [False, True])
def test_long_data_of_the_right_size_are_read(tmp_path, is_nested):
    model, codec = codec_of(tmp_path, "FP64", (2, 5000))
    values = np.random.default_rng(0).random((1, 2, 5000))
    data = values.tolist() if is_nested else values.reshape(-1).tolist()
    body = json.dumps({"inputs": [{"name": "x", "shape": [1, 2, 5000], "datatype": "FP64", "data": data}]}).encode()
    assert len(body) > 2**17
    asked = codec.decode(body)
    codec.write(asked, [0])
    assert np.array_equal(model.slab.inputs[0][0], values[0])


def test_an_input_and_an_output_may_have_the_same_name(tmp_path):
    one = TensorSpec(name="x", shape=(4,))
    served = ServedModel(
        name="m", slo=Seconds(1), latency=Latency(alpha=Seconds(0), beta=Seconds(0.01)), inputs=(one,), outputs=(one,)
    )
    model = facts(tmp_path, served.inputs, served.outputs)
    body = json.dumps(request((1, 2, 3, 4), outputs=[{"name": "x"}])).encode()
    _, (text, _) = ask(model, Codec(model), body)
    assert json.loads(text)["outputs"] == [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]


def test_bytes_of_booleans(tmp_path):
    _, codec = codec_of(tmp_path, "BOOL")
    item = {"name": "x", "shape": [1, 4], "datatype": "BOOL", "parameters": {"binary_data_size": 4}}
    text = json.dumps({"inputs": [item]}).encode()
    assert "has bytes other than 0 and 1" in refusal(codec, text + b"\x00\x01\x02\x00", len(text))


def test_inputs_have_as_many_samples(tmp_path):
    _, codec = two_of_each(tmp_path)
    x = {"name": "x", "shape": [2, 4], "datatype": "FP32", "data": [0.5] * 8}
    i = {"name": "i", "shape": [1, 2], "datatype": "INT8", "data": [1, 2]}
    assert "has 1 samples, and an earlier input has 2" in refusal(codec, {"inputs": [x, i]})
    assert refusal(codec, {"inputs": [i]}) == "Inputs are missing: 'x'."


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_outputs_that_are_not_finite_are_told_as_json_and_sent_as_binary(tmp_path, value):
    model, codec = codec_of(tmp_path)
    asked = codec.decode(json.dumps(request(count=2)).encode())
    model.slab.outputs[0][:] = 1
    model.slab.outputs[0][3, 2] = value
    with pytest.raises(NotFinite, match=r"'y' has values that are not finite.*binary_data"):
        codec.encode(asked, [2, 3])
    asked = codec.decode(json.dumps(request(count=2, parameters={"binary_data_output": True})).encode())
    body, json_bytes = codec.encode(asked, [2, 3])
    assert body[json_bytes:] == model.slab.outputs[0][2:4].tobytes()


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_halves_are_not_given_as_json(tmp_path, datatype):
    _, codec = codec_of(tmp_path, datatype, (2,))
    item = {"name": "x", "shape": [1, 2], "datatype": datatype, "parameters": {"binary_data_size": 4}}
    text = json.dumps({"inputs": [item]}).encode()
    assert f"Output 'y' is {datatype}, which JSON cannot carry" in refusal(codec, text + bytes(4), len(text))


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda deeper: st.lists(deeper, max_size=4) | st.dictionaries(st.text(max_size=5), deeper, max_size=4),
    max_leaves=8,
)
KEYS = ["name", "shape", "datatype", "data", "parameters"]


@ONCE
@given(st.dictionaries(st.sampled_from(KEYS), ANYTHING, min_size=1), st.dictionaries(st.text(max_size=9), ANYTHING))
def test_whatever_comes_is_understood_or_told(tmp_path_factory, item, more):
    model, codec = codec_of(tmp_path_factory.mktemp("slab"))
    document = request()
    document["inputs"][0] |= item
    with contextlib.suppress(BadRequest):
        ask(model, codec, json.dumps({**more, **document}).encode())


@ONCE
@given(st.binary(max_size=60), st.integers(0, 80) | st.none())
def test_bytes_that_mean_nothing_are_told(tmp_path_factory, body, json_bytes):
    _, codec = codec_of(tmp_path_factory.mktemp("slab"))
    refusal(codec, body, json_bytes)
