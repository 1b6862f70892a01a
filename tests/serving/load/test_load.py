"""A load on a stub: requests at their moments, what they say, and that everything that comes back is counted."""

import threading
import time

import numpy as np
import pytest

from meshwright.serving import draw_arrivals
from meshwright.serving.load import (
    RequestStream,
    decode_outputs,
    deployment_streams,
    draw_inputs,
    read_model,
    read_target,
    run_load,
)
from meshwright.serving.load import load_run as running
from meshwright.serving.load.loop import Loop
from meshwright.serving.load.result import UnansweredReason
from meshwright.spec import Gamma, Poisson, ServedModel, ServingError, Trace, read_deployment
from meshwright.spec.units import Seconds
from tests.events import SeenEvents
from tests.serving.load.stub import MODELS, Last, Stub, double, echo, respond

pytestmark = pytest.mark.timeout(60)


def cat(rate=300.0, **options):
    return [RequestStream(model="cat", arrivals=Poisson(rate=rate), **options)]


def served(streams):
    return [
        ServedModel(name=stream.model, slo=Seconds(1), arrivals=stream.arrivals, copies=stream.copies)
        for stream in streams
    ]


@pytest.fixture
def records(monkeypatch):
    """What a run in this process wrote down of each request: its job, begin and records."""
    found = []

    def run_here(job, tell):
        loop = Loop(job)
        try:
            loop.connect()
            begin_ns = time.perf_counter_ns() + 10_000_000
            result = loop.run(begin_ns, tell)
        finally:
            loop.close()
        found.append((job, begin_ns, result))
        return result

    monkeypatch.setattr(running, "run_here", run_here)
    return found


def test_the_requests_are_those_of_the_simulator(records):
    streams = [
        RequestStream(model="cat", arrivals=Poisson(rate=200)),
        RequestStream(model="dog", arrivals=Gamma(rate=100, shape=0.2), copies=2),
    ]
    with Stub(models={"cat": MODELS["cat"], "dog-0": MODELS["cat"], "dog-1": MODELS["cat"]}) as stub:
        result = run_load(stub.url, streams, 1.0, seed=4, scale=1.5)
    moments, whose = draw_arrivals(served(streams), 1.0, seed=4, scale=1.5)
    assert result.total.num_requests == result.total.num_in_time == len(moments) == len(stub.requests)
    assert [model.num_requests for model in result.models] == [(whose == 0).sum(), (whose > 0).sum()]
    asked = [request.model for request in stub.requests]
    assert [asked.count(name) for name in ("cat", "dog-0", "dog-1")] == np.bincount(whose, minlength=3).tolist()
    ((job, begin_ns, run),) = records
    assert (job.moments == moments).all()
    # Nothing is sent before its moment; the server sees it later still.
    assert (run.lateness >= 0).all()
    sent = {int(request.document["id"]): request.at * 1e9 for request in stub.requests}
    assert set(sent) == set(range(len(moments)))
    assert all(sent[number] >= begin_ns + moments[number] for number in sent)
    assert sum(row["num_requests"] for row in result.series) == len(moments)


@pytest.mark.parametrize("connections", [4, 1000])
@pytest.mark.matrix
def test_a_stall_is_seen_by_all_requests_that_fall_into_it(records, connections):
    """A client that waits for answers would send four requests in that second, and call one per cent slow."""
    stall = []

    def answer(request):
        if request.number == 60:
            stall[:] = request.at, request.at + 1.0
        if stall and request.at < stall[1]:
            return stall[1] - request.at, echo(request)
        return echo(request)

    with Stub(answer) as stub:
        result = run_load(stub.url, cat(300), 2.0, connections=connections)
    ((job, begin_ns, run),) = records
    at = (begin_ns + job.moments) / 1e9
    during = (at > stall[0]) & (at < stall[1])
    assert during.sum() > 200
    assert result.total.num_in_time == len(at)
    # Clocks and floats of 32 bits agree to a millisecond.
    assert (run.latency[during] >= stall[1] - at[during] - 1e-3).all()
    assert result.total.latency_s["p90_s"] > 0.5
    if connections == 4:
        assert result.num_waited > 150
        assert "found no idle connection" in " ".join(result.warnings())


def test_a_deadline_is_sent_and_counted():
    def answer(request):
        is_late = request.number % 2 == 0 and "parameters" in request.document
        return (3.0 if is_late else 0.0), echo(request)

    with Stub(answer) as stub:
        result = run_load(stub.url, cat(100, deadline_s=2.5), 1.0)
        free = run_load(stub.url, cat(20), 0.5)
    count = result.total.num_requests
    left = np.array([request.document["parameters"]["timeout"] for request in stub.requests[:count]])
    assert ((left > 0) & (left <= 2_500_000)).all()
    # It is less by as much as a request was sent late.
    assert np.quantile(2_500_000 - left, 0.5) / 1e6 == pytest.approx(result.row()["lateness_p50_s"], abs=1e-5)
    assert all("parameters" not in request.document for request in stub.requests[count:])
    assert result.total.num_late >= count // 2
    assert result.total.num_late + result.total.num_in_time == count
    assert free.total.num_in_time == free.total.num_requests > 0


def test_a_deployment_brings_its_deadlines_and_copies(tmp_path):
    file = tmp_path / "served.toml"
    file.write_text(
        'schema = "meshwright/deployment/1"\ndevices = 1\n[[models]]\nname = "cat"\nslo = "300 ms"\ncopies = 2\n'
        'latency = { alpha = "1 ms", beta = "1 ms" }\narrivals = { kind = "poisson", rate = 40 }\n'
    )
    (stream,) = deployment_streams(read_deployment(file))
    assert (stream.names, stream.deadline_s) == (("cat-0", "cat-1"), 0.3)
    (hurried,) = deployment_streams(read_deployment(file), 0.1)
    assert hurried.deadline_s == 0.1


def test_a_trace_is_replayed(tmp_path):
    file = tmp_path / "moments.txt"
    file.write_text("\n".join(map(str, np.linspace(0.01, 0.5, 40).tolist())))
    with Stub() as stub:
        result = run_load(stub.url, [RequestStream(model="cat", arrivals=Trace(file=str(file)))], 0.6)
    assert result.total.num_in_time == len(stub.requests) == 40


@pytest.mark.long
def test_a_ramp_comes_before_and_does_not_count():
    with Stub() as stub:
        result = run_load(stub.url, cat(400), 1.0, ramp_s=1.0)
    moments, _ = draw_arrivals(served(cat(400)), 2.0)
    assert result.total.num_requests == (moments >= 1e9).sum()
    before = len(stub.requests) - result.total.num_requests
    assert 100 < before < 300  # about half of 400


def test_every_status_is_counted():
    def answer(request):
        status = (200, 503, 500, 429)[request.number % 4]
        return echo(request) if status == 200 else respond(status, {"error": "no"})

    with Stub(answer) as stub:
        total = run_load(stub.url, cat(200), 1.0).total
    count = total.num_requests
    expected = {status: len(range(place, count, 4)) for place, status in enumerate((200, 503, 500, 429))}
    assert total.statuses == expected
    assert (total.num_in_time, total.num_rejected) == (expected[200], expected[503])
    assert total.rejected_p99_s > 0
    assert total.num_failed == total.num_malformed == total.num_wrong == total.num_unanswered == 0


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b"nonsense\r\n\r\n", "num_malformed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", "num_malformed"),
        (respond(200, {"id": "x"}) + b"HTTP/1.1 200 OK\r\n\r\n", "num_malformed"),
        (respond(200, {"outputs": []}), "num_malformed"),
        (respond(200, b"[1, 2"), "num_malformed"),
        (respond(200, {"id": "9999999999", "outputs": []}), "num_wrong"),
        (None, "num_failed"),
    ],
)
def test_what_is_no_answer_is_counted_and_others_are_answered(content, name):
    with Stub(lambda request: echo(request) if request.number % 3 else content) as stub:
        result = run_load(stub.url, cat(200), 0.4)
    total = result.total
    assert getattr(total, name) == len(range(0, total.num_requests, 3))
    assert total.num_in_time == total.num_requests - getattr(total, name)
    if name == "num_wrong":
        assert result.num_wrong == getattr(total, name)


def test_an_answer_that_was_cut_off_is_malformed():
    content = Last(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
    with Stub(lambda request: echo(request) if request.number % 5 else content) as stub:
        total = run_load(stub.url, cat(100), 1.0).total
    assert total.num_malformed == len(range(0, total.num_requests, 5))
    assert total.num_in_time == total.num_requests - total.num_malformed


def test_answers_to_the_wrong_callers_are_found():
    waiting = []

    def swap(request):
        """Every other request gets the answer of the one before it."""
        waiting.append(request)
        return echo(waiting[-2] if request.number % 2 else request)

    with Stub(swap) as stub:
        result = run_load(stub.url, cat(100), 1.0)
    assert result.num_wrong == result.total.num_requests // 2


def test_a_check_sees_the_values(records):
    with Stub(double) as stub:
        facts = read_model(read_target(stub.url), "cat")
        calls = []

        def check(model, number, answer):
            calls.append(number)
            asked = draw_inputs(facts, 3, seed=5, number=number)["x"]
            found = decode_outputs(answer)["y"]
            return model == "cat" and found.shape == (3, 4) and bool(np.allclose(found, 2 * asked))

        result = run_load(stub.url, cat(100), 0.5, rows=3, seed=5, check=check)
        assert (result.num_wrong, result.total.num_in_time) == (0, len(calls))
        assert len(set(calls)) > 1
        refused = run_load(stub.url, cat(100), 0.5, check=lambda model, number, answer: number != 0)
    assert refused.num_wrong == sum(int(request.document["id"]) % 8 == 0 for request in stub.requests[len(calls) :])
    assert refused.num_wrong > 0


@pytest.mark.long
def test_a_server_that_dies_and_comes_back():
    with Stub() as stub:
        timers = [threading.Timer(0.7, stub.stop), threading.Timer(1.2, stub.start)]
        for timer in timers:
            timer.start()
        # Attempts to connect are 10, 20, 40 ... ms apart: if the one at 1.33 s fails, the next comes at 1.97 s. Either
        # way the last second has a server.
        result = run_load(stub.url, cat(300), 4.0, connections=50)
        for timer in timers:
            timer.join(10)
        total = result.total
        assert total.num_failed > 50
        assert total.num_in_time > 300
        assert total.num_failed + total.num_in_time == total.num_requests
        assert result.series[-1]["num_in_time"] == result.series[-1]["num_requests"] > 0


def test_a_server_that_dies_for_good():
    with Stub() as stub:
        timer = threading.Timer(0.4, stub.stop)
        timer.start()
        total = run_load(stub.url, cat(200), 1.0).total
        timer.join(10)
    assert total.num_failed > 50
    assert total.num_failed + total.num_in_time == total.num_requests


@pytest.mark.long
def test_no_answer_by_the_end():
    with Stub(lambda request: echo(request) if request.number % 2 else (60.0, b"")) as stub:
        total = run_load(stub.url, cat(100), 0.5, grace_s=2.0).total
    assert total.num_unanswered == len(range(0, total.num_requests, 2))
    assert total.num_in_time == total.num_requests - total.num_unanswered


def test_requests_that_never_find_a_connection_are_unanswered():
    with Stub(lambda request: (60.0, b"")) as stub:
        result = run_load(stub.url, cat(100), 0.5, connections=2, grace_s=0.1)
    assert result.total.num_unanswered == result.total.num_requests
    assert result.num_waited == result.total.num_requests - 2


def test_an_end_before_its_time_reports_what_was_done():
    def check(model, number, answer):
        if len(stub.requests) > 40:
            raise KeyboardInterrupt
        return True

    with Stub() as stub:
        result = run_load(stub.url, cat(100), 30.0, check=check, grace_s=0.2)
    assert result.seconds < 29
    assert 40 < result.total.num_requests < 1000
    assert result.total.num_in_time >= 39
    assert len(result.series) == int(np.ceil(result.seconds))


@pytest.mark.long
def test_processes_send_the_same_requests():
    events = SeenEvents()
    with Stub() as stub:
        result = run_load(stub.url, cat(200, deadline_s=1.0), 1.0, seed=2, processes=2, events=events)
    moments, _ = draw_arrivals(served(cat(200)), 1.0, seed=2)
    assert sorted(int(request.document["id"]) for request in stub.requests) == list(range(len(moments)))
    total = result.total
    assert total.num_requests == total.num_in_time + total.num_late == len(moments)
    assert ("load", len(moments)) in {(name, total) for name, _, total in events.seen}


def test_a_token_is_sent():
    with Stub() as stub:
        run_load(stub.url, cat(20), 0.5, token="secret")
    assert {request.headers["authorization"] for request in stub.requests} == {"Bearer secret"}


def test_nobody_listens():
    with Stub() as stub:
        pass
    with pytest.raises(ServingError, match="No server answers at 127"):
        run_load(stub.url, cat(), 1.0)


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("https://127.0.0.1:1", {}, "without TLS"),
        ("127.0.0.1:1", {}, "is not the address of a server"),
        ("http://127.0.0.1:99999", {}, "is not the address of a server"),
        ("http://127.0.0.1:1/a b", {}, "characters"),
        ("http://127.0.0.1:1", {"token": "a\r\nb"}, "token"),
        ("http://127.0.0.1:1", {"processes": 0}, "processes is 0"),
        ("http://127.0.0.1:1", {"rows": 0}, "rows is 0"),
        ("http://127.0.0.1:1", {"ramp_s": -1.0}, "ramp_s is -1"),
    ],
)
def test_what_cannot_be_is_refused(url, options, message):
    with pytest.raises(ServingError, match=message):
        run_load(url, cat(), 1.0, **options)


def test_a_model_that_is_not_there_is_told_from_those_that_are():
    with Stub() as stub, pytest.raises(ServingError, match="did you mean 'cat'"):
        run_load(stub.url, [RequestStream(model="cats", arrivals=Poisson(rate=1))], 1.0)


def test_a_model_is_asked_once():
    with Stub() as stub, pytest.raises(ServingError, match="'cat' was given twice"):
        run_load(stub.url, cat() + cat(), 1.0)


def test_outcomes_are_no_statuses():
    assert all(outcome <= 0 for outcome in UnansweredReason)
