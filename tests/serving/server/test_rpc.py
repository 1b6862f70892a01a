"""A front's calls over gRPC, by real sockets, with a gate that tests decide for."""

import asyncio
import contextlib
import socket
import time
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.serving.server import messages
from meshwright.serving.server.front import Frontend
from meshwright.serving.server.gate import Fate
from meshwright.serving.server.http import HttpServer
from meshwright.serving.server.messages import SERVICE, SERVICE_NAME, classes_of
from meshwright.serving.server.rpc import serve_rpc
from meshwright.spec import DATATYPES, Server, TensorSpec
from tests.marks import examples, left_to_ci
from tests.serving.server.fakes import LOOPS, SLO_NS, FakeGate, copy_inputs, facts, until

ASK, ANSWER = classes_of("ModelInfer")
TRACE = f"00-{'1' * 32}-{'2' * 16}-01"
INVALID, UNAVAILABLE = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE


def is_own_span(told):
    """Is this the trace of `TRACE`, with another span?"""
    return told[:36] == TRACE[:36] and told[36:52] != TRACE[36:52] and told[52:] == TRACE[52:]


@pytest.fixture(params=["uvloop", *left_to_ci("asyncio")])
def loop(request):
    return request.param


def run(gate, scenario, loop="uvloop", token=None, **limits):
    """Run a scenario (server, channel) with a server on a free port; returns what it returns."""

    async def main():
        settings = Server(**limits)
        server = await serve_rpc(Frontend(gate, settings, token), settings, port=0)
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                return await asyncio.wait_for(scenario(server, channel), 30)
        finally:
            await server.drain(0.0)

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        return runner.run(main())


def call(channel, message=b"", method="ModelInfer", **options):
    data = message if isinstance(message, bytes) else message.SerializeToString()
    return channel.unary_unary(f"/{SERVICE_NAME}/{method}")(data, **options)


async def outcome(call):
    """Code, sentence or message, trailing metadata."""
    try:
        data = await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details(), dict(error.trailing_metadata())
    return grpc.StatusCode.OK, data, dict(await call.trailing_metadata())


def asked(gate, *messages, method="ModelInfer", token=None, loop="uvloop", metadata=None, **limits):
    """Outcomes of messages, one after the other."""

    async def scenario(_, channel):
        return [await outcome(call(channel, message, method, metadata=metadata)) for message in messages]

    return run(gate, scenario, loop, token, **limits)


def request(values=(1, 2, 3, 4), count=1, raw=True, **more):
    item = {"name": "x", "datatype": "FP32", "shape": [count, 4]}
    numbers = list(values) * count
    if raw:
        more.setdefault("raw_input_contents", [np.array(numbers, np.float32).tobytes()])
    else:
        item["contents"] = {"fp32_contents": numbers}
    return ASK(**{"model_name": "m", "inputs": [item], **more})


def values_of(data):
    answer = ANSWER.FromString(data)
    return [np.frombuffer(raw, np.float32).tolist() for raw in answer.raw_output_contents]


def parameter(**choice):
    return messages.GetMessageClass(SERVICE.file.message_types_by_name["InferParameter"])(**choice)


# --- messages -------------------------------------------------------------------------------------


def shape_of(descriptor):
    """All fields of a message and of those in it."""
    fields = {
        (field.name, field.number, field.type, field.is_repeated, field.message_type and field.message_type.full_name)
        for field in descriptor.fields
    }
    return fields, {nested.full_name: shape_of(nested) for nested in descriptor.nested_types}


def test_messages_are_those_of_the_protocol():
    """Another implementation's, which has the same names in the same process."""
    theirs = pytest.importorskip("tritonclient.grpc").service_pb2.DESCRIPTOR
    for name, message in SERVICE.file.message_types_by_name.items():
        assert shape_of(message) == shape_of(theirs.message_types_by_name[name]), name
    for name, method in SERVICE.methods_by_name.items():
        other = theirs.services_by_name["GRPCInferenceService"].methods_by_name[name]
        assert method.input_type.full_name == other.input_type.full_name
        assert method.output_type.full_name == other.output_type.full_name
        assert not method.server_streaming
        assert not method.client_streaming


def test_compiled_messages_are_those_of_the_text(tmp_path):
    protoc = pytest.importorskip("grpc_tools.protoc", reason="grpcio-tools is not installed")
    folder = Path(messages.__file__).parent
    out = tmp_path / "inference.pb"
    assert protoc.main(["protoc", f"-I{folder}", f"--descriptor_set_out={out}", str(folder / "inference.proto")]) == 0
    (anew,) = FileDescriptorSet.FromString(out.read_bytes()).file
    known = FileDescriptorProto()
    SERVICE.file.CopyToProto(known)
    assert anew.SerializeToString(deterministic=True) == known.SerializeToString(deterministic=True)


# --- what is answered -----------------------------------------------------------------------------


def test_inference(loop, tmp_path):
    gate = FakeGate(tmp_path)
    several = request(count=3, id="a", outputs=[{"name": "y"}])
    (one, _), (three, _) = (told[1:] for told in asked(gate, request(), several, loop=loop))
    assert values_of(one) == [[1, 2, 3, 4]]
    answer = ANSWER.FromString(three)
    assert (answer.model_name, answer.model_version, answer.id) == ("m", "1", "a")
    assert [(each.name, each.datatype, list(each.shape)) for each in answer.outputs] == [("y", "FP32", [3, 2, 2])]
    assert values_of(three) == [[1, 2, 3, 4] * 3]
    assert len(gate.models["m"].idle) == len(gate.models["m"].slab)


EXTREMES = {
    "BOOL": ("bool_contents", [False, True]),
    **{f"INT{bits}": ("int_contents", [-(2 ** (bits - 1)), 2 ** (bits - 1) - 1]) for bits in (8, 16, 32)},
    "INT64": ("int64_contents", [-(2**63), 2**63 - 1]),
    **{f"UINT{bits}": ("uint_contents", [0, 2**bits - 1]) for bits in (8, 16, 32)},
    "UINT64": ("uint64_contents", [0, 2**64 - 1]),
    "FP32": ("fp32_contents", [float("-inf"), 1.5]),
    "FP64": ("fp64_contents", [1e300, -0.0]),
}


@pytest.mark.parametrize("datatype", DATATYPES)
def test_values_as_numbers(tmp_path, datatype):
    """They come back as bytes, as from Triton."""
    tensors = [TensorSpec(name=name, datatype=datatype, shape=(2,)) for name in ("x", "y")]
    gate = FakeGate(tmp_path, facts(tmp_path, tensors[:1], tensors[1:]))
    field, values = EXTREMES.get(datatype, ("fp32_contents", [1.0, 2.0]))
    item = {"name": "x", "datatype": datatype, "shape": [1, 2], "contents": {field: values}}
    ((code, told, _),) = asked(gate, ASK(model_name="m", inputs=[item]))
    if datatype not in EXTREMES:
        assert (code, told) == (
            INVALID,
            f"Input 'x' is {datatype}, which contents cannot carry; send it in raw_input_contents.",
        )
        return
    answer = ANSWER.FromString(told)
    kind = {"BOOL": "bool", "FP32": "float32", "FP64": "float64"}.get(datatype, datatype.lower())
    assert np.array_equal(np.frombuffer(answer.raw_output_contents[0], kind), np.array(values, kind))
    assert not answer.outputs[0].HasField("contents")


def test_what_is_wrong_is_told(tmp_path):
    typed = request(raw=False).inputs[0]
    cases = [
        (b"\xff\xff", "not a valid inference.ModelInferRequest"),
        (request().SerializeToString()[:-3], "not a valid inference.ModelInferRequest"),
        (b"\x0a\x02\xff\xfe", "not a valid inference.ModelInferRequest"),
        (request(raw_input_contents=[b"1234" * 3]), "has 12 bytes; expected 16 for FP32"),
        (request(count=2, raw_input_contents=[b"1234" * 4]), "has 16 bytes; expected 32"),
        (request(raw_input_contents=[b"", b""]), "raw_input_contents has 2 entries; expected 1"),
        (request(inputs=[typed]), "both contents and raw_input_contents"),
        (request(raw=False, values=(1, 2, 3)), "has 3 values; expected 4 for its shape [1, 4]"),
        (ASK(model_name="m"), "Inputs are missing: 'x'"),
        (ASK(model_name="m", inputs=[{"name": "x", "datatype": "FP32", "shape": [1, 4]}]), "has 0 values; expected 4"),
        (
            ASK(
                model_name="m",
                inputs=[{"name": "x", "datatype": "FP32", "shape": [1, 4], "contents": {"int_contents": [1] * 4}}],
            ),
            "is FP32 and has int_contents; expected fp32_contents",
        ),
        (request(parameters={"timeout": parameter(string_param="x")}), "does not follow the Open Inference Protocol"),
        (request(parameters={"timeout": parameter(int64_param=0)}), "timeout is 0; expected microseconds"),
        (request(parameters={"timeout": parameter(int64_param=10**9)}), "timeout is 1000 s; expected 60 s at most"),
        (request(parameters={"priority": parameter(int64_param=-1)}), "priority is -1"),
        (request(parameters={"sequence_id": parameter(string_param="a")}), "sequence_id was given"),
        (request(outputs=[{"name": "z"}]), "There is no output 'z'"),
        (request(outputs=[{"name": "y"}, {"name": "y"}]), "requested twice"),
        (
            request(outputs=[{"name": "y", "parameters": {"classification": parameter(int64_param=1)}}]),
            "classification or shared_memory_region",
        ),
        (
            request(raw=False, inputs=[{"name": "x", "datatype": "FP32", "shape": [2**62, 4]}]),
            "expected 1 to 512 in a request",
        ),
    ]
    gate = FakeGate(tmp_path)
    told = asked(gate, *(message for message, _ in cases), request(parameters={"unknown": parameter(bool_param=True)}))
    for (message, expected), (code, sentence, _) in zip(cases, told, strict=False):
        assert code == INVALID, (message, sentence)
        assert expected in sentence
    assert told[-1][0] == grpc.StatusCode.OK
    assert not gate.submitted[1:]


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.lists(st.one_of(st.binary(max_size=80), st.integers(0, 60)), min_size=1, max_size=20))
def test_bytes_of_any_kind_do_no_harm(tmp_path_factory, data):
    """Noise, and requests of which a byte has another value."""
    whole = request().SerializeToString()
    noise = [
        each if isinstance(each, bytes) else whole[: each % len(whole)] + b"\x7f" + whole[each % len(whole) + 1 :]
        for each in data
    ]
    gate = FakeGate(tmp_path_factory.mktemp("noise"))
    *told, last = asked(gate, *noise, request())
    assert {code for code, *_ in told} <= {INVALID, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.OK}
    assert values_of(last[1]) == [[1, 2, 3, 4]]
    assert len(gate.models["m"].idle) == len(gate.models["m"].slab)


@pytest.mark.parametrize("fate", [each for each in Fate if each != Fate.DONE])
def test_fates(tmp_path, fate):
    ((code, _, fields),) = asked(
        FakeGate(tmp_path, decide=lambda _: fate), request(), metadata=[("traceparent", TRACE)]
    )
    failed = fate == Fate.FAILED
    assert code == (grpc.StatusCode.INTERNAL if failed else UNAVAILABLE)
    assert is_own_span(fields.pop("traceresponse"))
    assert fields == ({} if failed else {"retry-after": "1"})


def test_no_room_not_ready_and_not_finite(tmp_path):
    gate = FakeGate(tmp_path)
    ((_, data, _),) = asked(gate, request((float("nan"), 1, 2, float("inf"))))
    assert np.isnan(values_of(data)[0][0])
    idle, gate.models["m"].idle = gate.models["m"].idle, []
    assert [told[0] for told in asked(gate, request())] == [UNAVAILABLE]
    gate.models["m"].idle, gate.is_ready = idle, False
    assert [told[0] for told in asked(gate, request())] == [UNAVAILABLE]
    _, answers = classes_of("ModelReady")
    ((_, data, _),) = asked(gate, classes_of("ModelReady")[0](name="m"), method="ModelReady")
    assert not answers.FromString(data).ready


def test_a_failure_of_ours_is_told_and_logged(tmp_path, caplog):
    def decide(ticket):
        ticket.slots.append("x")
        return Fate.DONE

    ((code, sentence, _),) = asked(FakeGate(tmp_path, decide=decide), request())
    assert code == grpc.StatusCode.INTERNAL
    assert "log says why" in sentence
    assert "could not be answered" in caplog.text


def test_tokens_and_traces(loop, tmp_path):
    gate = FakeGate(tmp_path)
    for given_token, code in (
        (None, grpc.StatusCode.UNAUTHENTICATED),
        ("Bearer t", grpc.StatusCode.UNAUTHENTICATED),
        ("bearer  token", grpc.StatusCode.OK),
    ):
        metadata = [("traceparent", TRACE), *([("authorization", given_token)] if given_token else [])]
        ((told, _, fields),) = asked(gate, request(), token="token", loop=loop, metadata=metadata)
        assert told == code
        assert list(fields) == ["traceresponse"]
        assert is_own_span(fields["traceresponse"])
        ((told, *_),) = asked(gate, b"", method="RepositoryIndex", token="token", metadata=metadata)
        assert told == code
        ((told, *_),) = asked(gate, b"", method="ServerReady", token="token", metadata=metadata)
        assert told == grpc.StatusCode.OK
    ((_, _, fields),) = asked(gate, request(), metadata=[("traceparent", "ff" + TRACE[2:])])
    assert fields == {}


# --- time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "parameters", "deadline_s", "expected_s"),
    [
        ([], {}, None, SLO_NS / 1e9),
        ([], {}, 5, 5),
        ([], {}, 50, SLO_NS / 1e9),
        ([], {"timeout": 20_000_000}, None, 20),
        ([], {"timeout": 20_000_000}, 15, 15),
        ([("x-request-timeout-ms", "30000")], {"timeout": 40_000_000}, None, 30),
        ([("x-request-timeout-ms", "30000")], {}, 40, 30),
    ],
)
def test_deadlines(tmp_path, metadata, parameters, deadline_s, expected_s):
    gate = FakeGate(tmp_path)
    message = request(parameters={name: parameter(int64_param=value) for name, value in parameters.items()})

    async def scenario(_, channel):
        begin = time.monotonic_ns()
        assert (await outcome(call(channel, message, metadata=metadata, timeout=deadline_s)))[0] == grpc.StatusCode.OK
        return begin, time.monotonic_ns()

    begin, end = run(gate, scenario)
    # gRPC rounds a call's deadline.
    assert begin - 1e8 <= gate.submitted[0].deadline_ns - expected_s * 1e9 <= end + 1e8


@pytest.mark.long
def test_who_goes_cancels(loop, tmp_path):
    gate = FakeGate(tmp_path, decide=lambda _: None)

    async def scenario(server, channel):
        waiting = [call(channel, request()) for _ in range(3)]
        late = asyncio.create_task(outcome(call(channel, request(), timeout=3)))
        async with grpc.aio.insecure_channel(
            f"127.0.0.1:{server.port}", options=[("grpc.use_local_subchannel_pool", 1)]
        ) as other:
            gone = asyncio.create_task(outcome(call(other, request())))
            await until(lambda: len(gate.submitted) >= 5)
        for each in waiting[:2]:
            each.cancel()
        await until(lambda: len(gate.cancelled) >= 4)
        gate.tell(next(each for each in gate.submitted if each not in gate.cancelled), Fate.LATE)
        await asyncio.wait([gone])
        return (await late)[0], (await outcome(waiting[2]))[0], server._front.counts.cancelled

    late, last, cancelled = run(gate, scenario, loop)
    assert (late, last, cancelled) == (grpc.StatusCode.DEADLINE_EXCEEDED, UNAVAILABLE, 4)
    assert len(gate.models["m"].idle) == len(gate.models["m"].slab)


@pytest.mark.long
def test_a_message_has_to_come(loop, tmp_path):
    async def scenario(server, channel):
        slow = channel.stream_unary(f"/{SERVICE_NAME}/ModelInfer")()
        empty = channel.stream_unary(f"/{SERVICE_NAME}/ServerLive")()
        await empty.done_writing()
        return await outcome(slow), await outcome(empty), await outcome(call(channel, request()))

    slow, empty, good = run(FakeGate(tmp_path), scenario, loop, receive=1.5)
    assert slow[:2] == (grpc.StatusCode.ABORTED, "The request has not arrived within 1.5 s; send it faster.")
    assert empty[:2] == (INVALID, "The call has ended without a message; expected one message.")
    assert good[0] == grpc.StatusCode.OK


# --- limits ---------------------------------------------------------------------------------------


def test_messages_and_metadata_that_are_too_long(tmp_path):
    gate = FakeGate(tmp_path)
    bomb = ASK(model_name="m", id="a" * 2**20)

    async def scenario(_, channel):
        return [
            (await outcome(call(channel, ASK(id="a" * 5000))))[0],
            (await outcome(call(channel, bomb, compression=grpc.Compression.Gzip)))[0],
            (await outcome(call(channel, request(), metadata=[("some", "a" * 20_000)])))[0],
            (await outcome(call(channel, request())))[0],
        ]

    told = run(gate, scenario, body_bytes=4096)
    exhausted = grpc.StatusCode.RESOURCE_EXHAUSTED
    assert told == [exhausted, exhausted, exhausted, grpc.StatusCode.OK]


def test_no_more_calls_than_there_may_be(tmp_path):
    gate = FakeGate(tmp_path, decide=lambda _: None)

    async def scenario(_, channel):
        first = asyncio.create_task(outcome(call(channel, request())))
        await until(lambda: gate.submitted)
        second = await outcome(call(channel, request()))
        gate.tell(gate.submitted[0], copy_inputs(gate.submitted[0]))
        return (await first)[0], second[0]

    assert run(gate, scenario, connections=1) == (grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED)


def test_no_more_connections_than_there_may_be(tmp_path):
    async def scenario(server, channel):
        first = await outcome(call(channel, request()))
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=options) as other:
            return first[0], (await outcome(call(other, request())))[0], (await outcome(call(channel, request())))[0]

    told = run(FakeGate(tmp_path), scenario, connections=1)
    assert told == (grpc.StatusCode.OK, UNAVAILABLE, grpc.StatusCode.OK)


def test_idle_connections_are_closed_and_made_again(tmp_path):
    async def scenario(_, channel):
        first = await outcome(call(channel, request()))
        await until(lambda: channel.get_state() != grpc.ChannelConnectivity.READY)
        return first[0], (await outcome(call(channel, request())))[0]

    assert run(FakeGate(tmp_path), scenario, idle=0.3) == (grpc.StatusCode.OK, grpc.StatusCode.OK)


def test_both_protocols_end_together(loop, tmp_path):
    """What is under way is answered; nothing else is taken."""
    gate = FakeGate(tmp_path, decide=lambda _: None)

    async def scenario(server, channel):
        http = HttpServer(server._front, server._front.server)
        await http.listen("127.0.0.1", 0, False)
        under_way = asyncio.create_task(outcome(call(channel, request())))
        await until(lambda: gate.submitted)
        ending = asyncio.gather(server.drain(10), http.drain(10))
        await asyncio.sleep(0)
        further = [await outcome(call(channel, request())), await outcome(call(channel, b"", "ServerReady"))]
        gate.tell(gate.submitted[0], copy_inputs(gate.submitted[0]))
        await ending
        return [(await under_way)[0], *further, await outcome(call(channel, b"", "ServerReady"))]

    answered, refused, ready, ended = run(gate, scenario, loop)
    assert answered == grpc.StatusCode.OK
    assert refused[0] == UNAVAILABLE
    assert refused[1].startswith("The server is ending")
    assert refused[2]["retry-after"] == "1"
    assert ready[:2] == (grpc.StatusCode.OK, b"")
    assert ended[0] == UNAVAILABLE
    assert len(gate.submitted) == 1


def test_an_end_cancels_nothing(loop, tmp_path):
    """What was taken is answered, and nobody is told to have cancelled what comes meanwhile."""
    gate = FakeGate(tmp_path)

    async def scenario(server, _):
        codes = Counter()
        ending = asyncio.Event()

        async def keep_asking(channel):
            while not ending.is_set():
                codes[(await outcome(call(channel, request())))[0]] += 1

        options = [("grpc.use_local_subchannel_pool", 1)]
        async with contextlib.AsyncExitStack() as channels:
            asking = [
                asyncio.create_task(keep_asking(channel))
                for _ in range(4)
                for channel in [
                    await channels.enter_async_context(
                        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=options)
                    )
                ]
                for _ in range(4)
            ]
            await until(lambda: codes[grpc.StatusCode.OK] > 100)
            await server.drain(10)
            ending.set()
            await asyncio.gather(*asking)
        return codes

    codes = run(gate, scenario, loop)
    assert set(codes) == {grpc.StatusCode.OK, UNAVAILABLE}
    assert codes[grpc.StatusCode.OK] == len(gate.submitted)


@asynccontextmanager
async def slow_line(port, rate=400_000):
    """The port of a proxy to another one, whose client reads so many bytes per second."""
    loop, tasks = asyncio.get_running_loop(), set()

    def spawn(coroutine):
        tasks.add(asyncio.create_task(coroutine))

    async def pump(source, target, rate=None):
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(source, 4096):
                await loop.sock_sendall(target, data)
                await asyncio.sleep(len(data) / rate if rate else 0)
            target.shutdown(socket.SHUT_WR)

    async def accept(listener, sockets):
        while True:
            client = sockets.enter_context((await loop.sock_accept(listener))[0])
            server = sockets.enter_context(socket.socket())
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            for each in (client, server):
                each.setblocking(False)
            await loop.sock_connect(server, ("127.0.0.1", port))
            spawn(pump(client, server))
            spawn(pump(server, client, rate))

    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.setblocking(False)
        spawn(accept(listener, sockets))
        try:
            yield listener.getsockname()[1]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def test_an_answer_on_a_slow_line_arrives_before_the_end(tmp_path):
    """Also where the client asks on, which would reset a connection that had been closed."""
    size = 15_000

    def decide(ticket):
        ticket.model.slab.outputs[0][ticket.slots] = 1
        return Fate.DONE

    known = facts(tmp_path, outputs=(TensorSpec(name="y", shape=(size,)),), tensor_bytes=2**17)
    gate = FakeGate(tmp_path, known, decide=decide)

    async def scenario(server, _):
        async with (
            slow_line(server.port) as port,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            first = asyncio.create_task(outcome(call(channel, request())))
            await until(lambda: gate.submitted)
            ending = asyncio.create_task(server.drain(20))
            further = []
            while not ending.done():
                further.append(asyncio.create_task(outcome(call(channel, request()))))
                await asyncio.sleep(0.02)
            await ending
            return await first, {(await each)[0] for each in further}

    (code, data, _), further = run(gate, scenario)
    assert (code, values_of(data)) == (grpc.StatusCode.OK, [[1.0] * size])
    assert further <= {UNAVAILABLE}


def test_an_end_does_not_wait_forever(tmp_path):
    gate = FakeGate(tmp_path, decide=lambda _: None)

    async def scenario(server, channel):
        under_way = asyncio.create_task(outcome(call(channel, request())))
        await until(lambda: gate.submitted)
        await server.drain(0.1)
        return (await under_way)[0]

    assert run(gate, scenario) == UNAVAILABLE
    assert gate.cancelled == gate.submitted
