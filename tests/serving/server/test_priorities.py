"""More is asked than can be answered, of a real server: what says that it is more important is answered."""

import json
import subprocess
import sys

import grpc
import pytest

from meshwright.serving.server.messages import classes_of
from tests.serving.server.servers import ask_once, infer, serving

pytestmark = pytest.mark.long  # the server takes seconds to start

BUSY = """
schema = "meshwright/deployment/1"
devices = 1
policy = "{policy}"

[[models]]
name = "m"
slo = "800 ms"
latency = {{ alpha = "8 ms", beta = "80 ms", largest = 8 }}
inputs = [{{ name = "x", datatype = "INT64", shape = [3] }}]
outputs = [{{ name = "y", datatype = "INT64", shape = [3] }}]
"""
# What the device can do: batches of 8 in 144 ms, which is long beside what a busy machine is late.
MOST_PER_S = 8 / 0.144
# A machine that stalls makes requests late whatever they say; it does not do so each time.
TRIES = 3


def load(server, rate, priority):
    command = [sys.executable, "-m", "meshwright", "serve", "load", f"http://127.0.0.1:{server.port}"]
    command += ["--rate", str(rate), "--deadline", "800 ms", "--seconds", "8", "--ramp", "1", "--json"]
    command += [] if priority is None else ["--priority", str(priority)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@pytest.mark.timeout(300)
@pytest.mark.long
@pytest.mark.parametrize(
    "policy",
    [
        "adaptive",
        "nexus",
        pytest.param("symphony", marks=pytest.mark.slow),
        pytest.param("deferred:admit=100", marks=pytest.mark.slow),
    ],
)
def test_important_requests_are_answered_while_others_are_not(tmp_path, policy):
    with serving(tmp_path, BUSY.format(policy=policy)) as server:
        found = []
        while not any(first > 0.9 and first > usual + 0.05 > last + 0.25 for first, usual, last in found):
            assert len(found) < TRIES, found
            found.append(shares_in_time(server))


def shares_in_time(server):
    """Of requests that say that they are important, of those that say nothing, and of those that are not."""
    loads = [load(server, 0.3 * MOST_PER_S, 1), load(server, MOST_PER_S, None), load(server, MOST_PER_S, 7)]
    try:
        return [json.loads(one.communicate(timeout=60)[0])["in_time_share"] for one in loads]
    finally:
        for one in loads:
            one.kill()
            one.wait(10)


@pytest.mark.parametrize("priority", [0, 1, 7, 8, 2**64 - 1])
def test_any_priority_can_be_said(priority, whole):
    data, values = infer([[1, 2, 3]], parameters={"priority": priority})
    status, document = ask_once(whole, data)
    assert status == 200, document
    assert document["outputs"][0]["data"] == values
    if priority < 2**63:  # what a parameter of gRPC can have
        request_class, answer_class = classes_of("ModelInfer")
        message = request_class(model_name="m")
        message.inputs.add(name="x", datatype="INT64", shape=[1, 3]).contents.int64_contents.extend(values)
        message.parameters["priority"].int64_param = priority
        with grpc.insecure_channel(f"127.0.0.1:{whole.grpc}") as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            answer = answer_class.FromString(call(message.SerializeToString(), timeout=20))
        assert len(answer.raw_output_contents[0]) == 24


@pytest.mark.parametrize("priority", [-1, 2**64])
def test_others_are_refused(whole, priority):
    status, document = ask_once(whole, infer([[1, 2, 3]], parameters={"priority": priority})[0])
    assert status == 400
    assert "priority" in document["error"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("priorities")) as server:
        yield server
        assert server.end() == 0
