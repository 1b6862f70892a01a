"""The client that most people have, Triton's, against a server of real processes: all that it can ask for."""

import time

import numpy as np
import pytest

from meshwright.spec import DATATYPES
from tests.serving.server.servers import serving

http = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
errors = pytest.importorskip("tritonclient.utils")

MODEL = """
[[models]]
name = "{name}"
slo = "5 s"
latency = {{ alpha = "20 us", beta = "1 ms", largest = 16 }}
inputs = [{{ name = "x", datatype = "{datatype}", shape = [2, 3] }}, {{ name = "z", datatype = "INT8", shape = [] }}]
outputs = [{{ name = "y", datatype = "{datatype}", shape = [6] }}, {{ name = "w", datatype = "INT8", shape = [] }}]
"""
VALUES = {
    "BOOL": [0, 1],
    "FP16": [0.5, -65504.0],
    "FP32": [1e-30, -3.4e38],
    "FP64": [1e-300, -1.7e308],
    "BF16": [0.5, -2.0],
}


def echoing(folder, *options):
    """A server of one model for each datatype."""
    text = 'schema = "meshwright/deployment/1"\ndevices = 1\npolicy = "eager"\n'
    return serving(
        folder, text + "".join(MODEL.format(name=name.lower(), datatype=name) for name in DATATYPES), *options
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with echoing(tmp_path_factory.mktemp("triton")) as server:
        yield server
        assert server.end() == 0


@pytest.fixture
def client(server):
    with http.InferenceServerClient(f"127.0.0.1:{server.port}", network_timeout=30) as client:
        yield client


def values_of(datatype, count=4):
    """Extreme values of a type, as numpy has them."""
    kind = errors.triton_to_np_dtype(datatype)
    given = VALUES[datatype] if datatype in VALUES else [np.iinfo(kind).min, np.iinfo(kind).max]
    return np.resize(np.array(given, kind), (count, 2, 3))


def inputs_of(datatype, values, make=http.InferInput, **options):
    given, other = make("x", list(values.shape), datatype), make("z", [len(values)], "INT8")
    given.set_data_from_numpy(values, **options)
    other.set_data_from_numpy(np.arange(len(values), dtype=np.int8), **options)
    return [given, other]


@pytest.mark.parametrize("asks_binary", [True, False])
@pytest.mark.parametrize("sends_binary", [True, False])
@pytest.mark.parametrize("datatype", DATATYPES)
def test_values_of_all_datatypes_come_back(client, datatype, sends_binary, asks_binary):
    if datatype in ("FP16", "BF16") and not (sends_binary and asks_binary):
        pytest.skip("travels as binary only")
    values = values_of(datatype)
    outputs = [http.InferRequestedOutput(name, binary_data=asks_binary) for name in ("w", "y")]
    answer = client.infer(
        datatype.lower(),
        inputs_of(datatype, values, binary_data=sends_binary),
        outputs=outputs,
        request_id="a",
        model_version="1",
    )
    document = answer.get_response()
    assert (document["id"], document["model_name"], document["model_version"]) == ("a", datatype.lower(), "1")
    assert [item["name"] for item in document["outputs"]] == ["w", "y"]
    assert np.array_equal(answer.as_numpy("y").reshape(values.shape), values)
    assert np.array_equal(answer.as_numpy("w"), np.arange(4, dtype=np.int8))


def test_without_outputs_all_come_as_the_client_asks(client):
    values = values_of("INT32", 1)
    answer = client.infer("int32", inputs_of("INT32", values))
    assert np.array_equal(answer.as_numpy("y").reshape(values.shape), values)
    assert answer.get_output("w")["datatype"] == "INT8"


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_bodies_may_be_compressed(client, algorithm):
    values = values_of("FP64", 1000)
    answer = client.infer(
        "fp64",
        inputs_of("FP64", values),
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    assert np.array_equal(answer.as_numpy("y").reshape(values.shape), values)


def test_many_requests_at_once(server):
    with http.InferenceServerClient(f"127.0.0.1:{server.port}", concurrency=8) as client:
        asked = []
        for place in range(200):
            values = np.full((1, 2, 3), place, np.int64)
            asked.append((values, client.async_infer("int64", inputs_of("INT64", values))))
        for values, request in asked:
            assert np.array_equal(request.get_result(timeout=30).as_numpy("y").reshape(values.shape), values)


def test_what_a_server_tells_of_itself(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("fp32")
    assert client.is_model_ready("fp32", "1")
    assert not client.is_model_ready("nothing")
    about = client.get_server_metadata()
    assert about["name"] == "meshwright"
    assert "binary_tensor_data" in about["extensions"]
    model = client.get_model_metadata("uint8")
    assert (model["name"], model["versions"]) == ("uint8", ["1"])
    assert model["inputs"][0] == {"name": "x", "datatype": "UINT8", "shape": [-1, 2, 3]}
    index = client.get_model_repository_index()
    assert {item["name"] for item in index} == {name.lower() for name in DATATYPES}
    assert {item["state"] for item in index} == {"READY"}


def test_timeouts_and_priorities(client):
    inputs = inputs_of("FP32", values_of("FP32"))
    assert client.infer("fp32", inputs, timeout=5_000_000, priority=1) is not None
    begin = time.monotonic()
    with pytest.raises(errors.InferenceServerException, match="cannot be answered by its deadline") as told:
        client.infer("fp32", inputs, timeout=1)
    assert told.value.status() == "503"
    assert time.monotonic() - begin < 4.5  # the model's SLO is 5 s
    with pytest.raises(errors.InferenceServerException, match="at most") as told:
        client.infer("fp32", inputs, timeout=10**12)
    assert told.value.status() == "400"


def test_errors_say_what_is_wrong(client):
    values = values_of("FP32")
    for name, version, inputs, status, text in (
        ("nothing", "", inputs_of("FP32", values), "404", "There is no model 'nothing'"),
        ("fp32", "7", inputs_of("FP32", values), "404", "has no version '7'"),
        ("fp64", "", inputs_of("FP32", values), "400", "was sent as 'FP32'; expected FP64"),
        ("fp32", "", inputs_of("FP32", values)[:1], "400", "Inputs are missing: 'z'"),
        ("fp32", "", inputs_of("FP32", values[:, :1]), "400", r"has the shape \[4, 1, 3\]"),
    ):
        with pytest.raises(errors.InferenceServerException, match=text) as told:
            client.infer(name, inputs, model_version=version)
        assert told.value.status() == status
    refuse_options(client, inputs_of("FP32", values), http.InferRequestedOutput)


def refuse_options(client, inputs, output):
    for options, text in (
        ({"sequence_id": 5}, "sequence_id"),
        ({"outputs": [output("v")]}, "There is no output 'v'"),
        ({"outputs": [output("y", class_count=2)]}, "not supported"),
    ):
        with pytest.raises(errors.InferenceServerException, match=text):
            client.infer("fp32", inputs, **options)
