"""Triton's client over gRPC, plain and asyncio, against a server of real processes: all that it can ask for."""

import asyncio
import concurrent.futures
import time
from functools import partial

import numpy as np
import pytest

from meshwright.spec import DATATYPES
from tests.serving.server.servers import EMULATED, serving, wait_until_gone
from tests.serving.server.test_triton_client import echoing, refuse_options, values_of
from tests.serving.server.test_triton_client import inputs_of as echoed_inputs

pytestmark = pytest.mark.long  # the server takes seconds to start

triton = pytest.importorskip("tritonclient.grpc", reason="tritonclient with grpcio is not installed")
triton_aio = pytest.importorskip("tritonclient.grpc.aio")
errors = pytest.importorskip("tritonclient.utils")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with echoing(tmp_path_factory.mktemp("triton"), "--fronts", "2") as server:
        yield server
        assert server.end() == 0


@pytest.fixture
def client(server):
    with triton.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        yield client


inputs_of = partial(echoed_inputs, make=triton.InferInput)


@pytest.mark.parametrize("datatype", DATATYPES)
def test_values_of_all_datatypes_come_back(client, datatype):
    values = values_of(datatype)
    outputs = [triton.InferRequestedOutput(name) for name in ("w", "y")]
    answer = client.infer(
        datatype.lower(), inputs_of(datatype, values), outputs=outputs, request_id="a", model_version="1"
    )
    told = answer.get_response()
    assert (told.id, told.model_name, told.model_version) == ("a", datatype.lower(), "1")
    assert [output.name for output in told.outputs] == ["w", "y"]
    assert list(told.outputs[1].shape) == [4, 6]
    assert np.array_equal(answer.as_numpy("y").reshape(values.shape), values)
    assert np.array_equal(answer.as_numpy("w"), np.arange(4, dtype=np.int8))


def test_without_outputs_all_come(client):
    values = values_of("INT32", 1)
    answer = client.infer("int32", inputs_of("INT32", values))
    assert [output.name for output in answer.get_response().outputs] == ["y", "w"]
    assert np.array_equal(answer.as_numpy("y").reshape(values.shape), values)
    one = client.infer("int32", inputs_of("INT32", values), outputs=[triton.InferRequestedOutput("w")])
    assert [output.name for output in one.get_response().outputs] == ["w"]


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_messages_may_be_compressed(client, algorithm):
    values = values_of("FP64", 1000)
    answer = client.infer("fp64", inputs_of("FP64", values), compression_algorithm=algorithm)
    assert np.array_equal(answer.as_numpy("y").reshape(values.shape), values)


def test_many_requests_at_once(server, client):
    asked = []
    for place in range(200):
        values, told = np.full((1 + place % 3, 2, 3), place, np.int64), concurrent.futures.Future()
        client.async_infer(
            "int64",
            inputs_of("INT64", values),
            lambda result, error, told=told: told.set_result((result, error)),
        )
        asked.append((values, told))
    for values, told in asked:
        result, error = told.result(30)
        assert error is None
        assert np.array_equal(result.as_numpy("y").reshape(values.shape), values)

    async def main():
        async with triton_aio.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
            answers = await asyncio.gather(*(client.infer("int64", inputs_of("INT64", values)) for values, _ in asked))
        for (values, _), answer in zip(asked, answers, strict=True):
            assert np.array_equal(answer.as_numpy("y").reshape(values.shape), values)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_what_a_server_tells_of_itself(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("fp32")
    assert client.is_model_ready("fp32", "1")
    assert not client.is_model_ready("fp32", "2")
    assert not client.is_model_ready("nothing")
    about = client.get_server_metadata()
    assert about.name == "meshwright"
    assert "binary_tensor_data" in about.extensions
    model = client.get_model_metadata("uint8")
    assert (model.name, list(model.versions)) == ("uint8", ["1"])
    assert (model.inputs[0].name, model.inputs[0].datatype, list(model.inputs[0].shape)) == ("x", "UINT8", [-1, 2, 3])
    index = client.get_model_repository_index().models
    assert {item.name for item in index} == {name.lower() for name in DATATYPES}
    assert {item.state for item in index} == {"READY"}


def test_what_is_not_supported_is_told(client):
    for ask in (client.get_inference_statistics, client.get_trace_settings, lambda: client.load_model("fp32")):
        with pytest.raises(errors.InferenceServerException, match="Method not found") as told:
            ask()
        assert told.value.status() == "StatusCode.UNIMPLEMENTED"


def test_timeouts_and_priorities(client):
    inputs = inputs_of("FP32", values_of("FP32"))
    assert client.infer("fp32", inputs, timeout=5_000_000, priority=1, client_timeout=20) is not None
    longest = 0.0
    for asked in ({"timeout": 1}, {"headers": {"x-request-timeout-ms": "1"}, "timeout": 1}):
        begin = time.monotonic()
        with pytest.raises(errors.InferenceServerException, match="cannot be answered by its deadline") as told:
            client.infer("fp32", inputs, **asked)
        longest = max(longest, time.monotonic() - begin)
        assert told.value.status() == "StatusCode.UNAVAILABLE"
    assert longest < 4.5  # the model's SLO is 5 s
    with pytest.raises(errors.InferenceServerException, match="at most") as told:
        client.infer("fp32", inputs, timeout=10**12)
    assert told.value.status() == "StatusCode.INVALID_ARGUMENT"
    with pytest.raises(errors.InferenceServerException, match="is 'x'; expected an integer"):
        client.infer("fp32", inputs, headers={"x-request-timeout-ms": "x"})
    with pytest.raises(errors.InferenceServerException) as told:
        client.infer("fp32", inputs, client_timeout=0.0001)
    # Who is sooner, the server that cannot or the client that waits no longer, is open.
    assert told.value.status() in ("StatusCode.DEADLINE_EXCEEDED", "StatusCode.UNAVAILABLE")


def test_errors_say_what_is_wrong(client):
    values = values_of("FP32")
    bytes_ = triton.InferInput("x", [4, 2, 3], "BYTES")
    bytes_.set_data_from_numpy(np.full((4, 2, 3), b"a", np.object_))
    for name, version, inputs, status, text in (
        ("nothing", "", inputs_of("FP32", values), "NOT_FOUND", "There is no model 'nothing'"),
        ("fp32", "7", inputs_of("FP32", values), "NOT_FOUND", "has no version '7'"),
        ("fp64", "", inputs_of("FP32", values), "INVALID_ARGUMENT", "was sent as 'FP32'; expected FP64"),
        ("fp32", "", inputs_of("FP32", values)[:1], "INVALID_ARGUMENT", "Inputs are missing: 'z'"),
        ("fp32", "", inputs_of("FP32", values)[:1] * 2, "INVALID_ARGUMENT", "was sent twice"),
        ("fp32", "", inputs_of("FP32", values[:, :1]), "INVALID_ARGUMENT", r"has the shape \[4, 1, 3\]"),
        ("fp32", "", inputs_of("FP32", np.zeros((1025, 2, 3), np.float32)), "INVALID_ARGUMENT", "expected 1 to 1024"),
        ("fp32", "", [bytes_], "INVALID_ARGUMENT", "was sent as 'BYTES'; expected FP32"),
    ):
        with pytest.raises(errors.InferenceServerException, match=text) as told:
            client.infer(name, inputs, model_version=version)
        assert told.value.status() == f"StatusCode.{status}"
    refuse_options(client, inputs_of("FP32", values), triton.InferRequestedOutput)
    shared = triton.InferInput("x", [4, 2, 3], "FP32")
    shared.set_shared_memory("region", 96)
    with pytest.raises(errors.InferenceServerException, match="is in shared memory, which is not supported"):
        client.infer("fp32", [shared])


def small(rows=1):
    given = triton.InferInput("x", [rows, 3], "INT64")
    given.set_data_from_numpy(np.arange(3 * rows).reshape(rows, 3))
    return [given]


ONE_BY_ONE = EMULATED.replace("devices = 2", "devices = 1").replace("largest = 64", "largest = 1")
ONE_BY_ONE = ONE_BY_ONE.replace('slo = "5 s"', 'slo = "60 s"')
SLOW, SLOWER = ONE_BY_ONE.replace("1 ms", "1 s"), ONE_BY_ONE.replace("1 ms", "3 s")


@pytest.mark.long
def test_requests_that_wait_are_not_computed_when_they_are_cancelled(tmp_path):
    with serving(tmp_path, SLOWER) as server:

        def fates(status):
            return status["models"][0]["fates"]

        async def main():
            async with triton_aio.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
                tasks = [asyncio.create_task(client.infer("m", small())) for _ in range(12)]
                await asyncio.to_thread(server.wait_for, lambda status: status["queued"] >= 8)
                for task in tasks:
                    task.cancel()
                told = await asyncio.gather(*tasks, return_exceptions=True)
            return sum(not isinstance(each, BaseException) for each in told)

        begin = time.monotonic()
        num_answered = asyncio.run(asyncio.wait_for(main(), 90))
        # Only where all this has taken long.
        assert num_answered <= (time.monotonic() - begin) // 3
        server.wait_for(lambda status: status["queued"] == 0 and "cancelled" in fates(status))
        # One runs, and one may be with the worker already.
        most = 2 + (time.monotonic() - begin) // 3
        status = server.wait_for(lambda status: sum(fates(status).values()) == 12)
        assert fates(status)["cancelled"] >= 12 - most


async def ask_more_than_can_be_answered(client):
    crowd = [client.infer("m", small(), timeout=4_000_000) for _ in range(20)]
    told = await asyncio.gather(*crowd, return_exceptions=True)
    done = [each for each in told if not isinstance(each, BaseException)]
    refused = [each for each in told if isinstance(each, errors.InferenceServerException)]
    assert 1 <= len(done) < 20
    assert len(done) + len(refused) == 20
    assert {each.status() for each in refused} == {"StatusCode.UNAVAILABLE"}


@pytest.mark.long
def test_what_is_too_much_or_under_way_at_the_end(tmp_path):
    with serving(tmp_path, SLOW) as server:

        async def main():
            async with triton_aio.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
                await ask_more_than_can_be_answered(client)
                # What is told of a queue is of a moment before.
                await asyncio.to_thread(server.wait_for, lambda status: status["queued"] == 0)
                last = [asyncio.create_task(client.infer("m", small())) for _ in range(8)]
                await asyncio.to_thread(server.wait_for, lambda status: status["queued"] >= 4)
                # A connection's calls are begun in order: all of them are.
                assert await client.is_server_live()
                pids = server.pids()
                server.process.terminate()
                for answer in await asyncio.gather(*last):
                    assert answer.as_numpy("y").tolist() == [[0, 1, 2]]
                return pids

        pids = asyncio.run(asyncio.wait_for(main(), 90))
        assert server.process.wait(40) == 0
        wait_until_gone(pids.values())


@pytest.mark.long
def test_a_token_is_asked_for(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    with serving(tmp_path, EMULATED, "--token-file", str(tmp_path / "token")) as server:
        with triton.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
            assert client.is_server_live()
            assert client.is_server_ready()
            for headers in (None, {"authorization": "Bearer other"}, {"authorization": "Basic secret"}):
                for ask, *arguments in ((client.infer, "m", small()), (client.get_model_metadata, "m")):
                    with pytest.raises(errors.InferenceServerException, match="no valid token") as told:
                        ask(*arguments, headers=headers)
                    assert told.value.status() == "StatusCode.UNAUTHENTICATED"
            answer = client.infer("m", small(), headers={"authorization": "bearer secret"})
            assert answer.as_numpy("y").tolist() == [[0, 1, 2]]
        assert server.end() == 0
