"""Heads that were read before mean what they meant then: answers are the same as if each request were parsed."""

import asyncio
import random
import re

import pytest

from meshwright.serving.server.connection import Connection
from meshwright.serving.server.front import Frontend
from meshwright.serving.server.heads import LONGEST_HEAD, Heads
from meshwright.serving.server.http import HttpServer
from meshwright.spec import Server
from tests.serving.server.fakes import SLO_NS, FakeGate, copy_inputs, get, post, request

GOOD = post(request())
OTHER = post(request(id="another, whose body is longer"))
TIMED = post(request(), headers="X-Request-Timeout-Ms: 1000\r\n")
HEAD, BODY = GOOD[: GOOD.find(b"\r\n\r\n") + 4], GOOD[GOOD.find(b"\r\n\r\n") + 4 :]


class Forgetful(Heads):
    """Never learns anything."""

    def learn(self, data, exchange):
        pass


class Wire:
    """A connection without sockets; what it writes is kept."""

    def __init__(self, server):
        self.sent, self.is_closed, self.is_reading = b"", False, True
        self.connection = Connection(server)
        self.connection.connection_made(self)

    async def send(self, *pieces):
        """What has been written since, without dates."""
        for piece in pieces or (b"",):
            if piece and not self.is_closed:
                self.connection.data_received(piece)
            for _ in range(3):
                await asyncio.sleep(0)
        sent, self.sent = self.sent, b""
        return re.sub(rb"Date: [^\r]*\r\n", b"", sent)

    def write(self, data):
        assert not self.is_closed
        self.sent += data

    def close(self):
        self.is_closed = True

    abort = write_eof = close

    def is_closing(self):
        return self.is_closed

    def set_write_buffer_limits(self, high):
        pass

    def pause_reading(self):
        self.is_reading = False

    def resume_reading(self):
        self.is_reading = True


def play(gate, scenario, *, heads=None, token=None, **limits):
    """Run a scenario of a server."""

    async def main():
        settings = Server(**limits)
        server = HttpServer(Frontend(gate, settings, token), settings)
        if heads is not None:
            server.heads = heads
        return await scenario(server)

    return asyncio.run(main())


def statuses(answers):
    return [int(status) for status in re.findall(rb"HTTP/1.1 (\d+)", answers)]


def test_what_was_read_once_is_not_parsed_again(tmp_path):
    gate = FakeGate(tmp_path)

    async def scenario(server):
        first, second = Wire(server), Wire(server)
        one = await first.send(GOOD)
        # Nothing can be parsed without it.
        second.connection._parser = None
        return (
            one,
            await second.send(GOOD),
            await second.send(GOOD),
            await second.send(HEAD + BODY.replace(b"[1, 2", b"[7, 2")),
        )

    one, two, three, four = play(gate, scenario)
    assert statuses(one) == [200]
    assert one == two == three
    assert four == one.replace(b"[1.0,2.0", b"[7.0,2.0")
    assert len(gate.models["m"].idle) == len(gate.models["m"].slab)


def test_a_deadline_is_that_of_the_head_each_time(tmp_path):
    gate = FakeGate(tmp_path)

    async def scenario(server):
        wire = Wire(server)
        for message in (GOOD, TIMED, GOOD, TIMED):
            await wire.send(message)
        return len(server.heads)

    assert play(gate, scenario) == 2
    moments = [ticket.deadline_ns for ticket in gate.submitted]
    assert moments[1] < moments[3] < moments[0] < moments[2] < moments[3] + SLO_NS


@pytest.mark.parametrize(
    "pieces",
    [
        [get("/v2")],
        [GOOD * 2],
        [GOOD + b"\r\n"],
        [GOOD[:-1], GOOD[-1:]],
        [HEAD, BODY],
        [b"P", GOOD[1:]],
        [post(request(), headers="Connection: close\r\n")],
        [GOOD.replace(b"HTTP/1.1", b"HTTP/1.0")],
        [GOOD.replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"Host: h", b"Connection: keep-alive")],
        [post(request(), headers="Expect: 100-continue\r\n")],
        [post(request(), headers="Expect: something\r\n")],
        [post(request(), headers="traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\r\n")],
        [post(request(), headers=f"X: {LONGEST_HEAD * 'x'}\r\n")],
        [post(b"", "/v2/repository/index")],
        [post(request(), headers="Connection: upgrade\r\nUpgrade: h2c\r\n")],
        [b"POST /v2/models/m/infer HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"],
        [GOOD.replace(b"Host: h\r\n", b"")],
        [GOOD.replace(b"Host: h\r\n", b"Host: h\n")],
        [GOOD.replace(b"Host: h\r\n", b"Host: h\r\n\r\n")],
    ],
)
def test_what_is_not_remembered(tmp_path, pieces):
    async def scenario(server):
        wire = Wire(server)
        await wire.send(*pieces)
        return dict(server.heads)

    assert play(FakeGate(tmp_path), scenario) == {}


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        # Two requests, three, and one and a half at once.
        ([GOOD * 2], [200] * 2),
        ([GOOD * 3, GOOD], [200] * 4),
        ([GOOD + GOOD[:50], GOOD[50:], GOOD], [200] * 3),
        # A body that is shorter than its Content-Length goes on with what comes next, whatever that looks like.
        ([GOOD[:-5], GOOD[-5:], GOOD], [200] * 2),
        ([HEAD, BODY, GOOD], [200] * 2),
        ([GOOD[:-5], GOOD], [400, 400]),
        ([GOOD[:-5], HEAD], [400, 400]),
        # What is longer than its Content-Length is the beginning of another request.
        ([HEAD + BODY + b"P"], [200]),
        ([HEAD + BODY + b"\0"], [200, 400]),
        ([GOOD + HEAD, BODY], [200] * 2),
        # The same bytes as a body are no request, nor is what begins in the middle of another.
        ([post(b"x", length=len(GOOD))[:-1], GOOD, GOOD], [400, 200]),
        ([GOOD[:20], GOOD], [400]),
        # Lines without meaning before a request may come together with it, or not.
        ([b"\r\n", GOOD, b"\r\n" + GOOD, GOOD], [200] * 3),
        # Another length, or another head, is another request.
        ([OTHER, GOOD, OTHER], [200] * 3),
        ([HEAD.replace(b"Content-Length: ", b"Content-Length: 1") + BODY], []),
        ([GOOD.replace(b"/m/", b"/z/"), GOOD], [404, 200]),
        ([HEAD + b"x" * len(BODY), GOOD], [400, 200]),
        ([get("/v2") + GOOD, GOOD], [200] * 3),
    ],
)
def test_a_head_that_is_known_smuggles_nothing(tmp_path, pieces, expected):
    async def scenario(server):
        known = Wire(server)
        await known.send(GOOD)
        return await Wire(server).send(*pieces)

    gate = FakeGate(tmp_path)
    answers = play(gate, scenario)
    assert statuses(answers) == expected
    assert answers == play(gate, scenario, heads=Forgetful())


PARTS = [
    *(GOOD, OTHER, TIMED, HEAD, BODY, GOOD[:-3], GOOD[-3:], b"\r\n", get("/v2")),
    *(GOOD * 3, OTHER + GOOD, post(b"{}"), post(request(), headers="Expect: 100-continue\r\n"), b"\0"),
    post(request(), headers="Connection: close\r\n"),
    b"POST /v2/models/m/infer HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
]
WEIGHTS = [10, 4, 4, 2, 2, 1, 1, 1, 2, 1, 2, 1, 1, 0.2, 0.5, 1]


def test_answers_are_those_of_the_parser(tmp_path):
    """Whatever comes in whatever pieces, on several connections of a server."""
    chance = random.Random(0)
    talks = [chance.choices(PARTS, WEIGHTS, k=12) for _ in range(200)]
    for talk in talks[::3]:
        at = chance.randrange(len(talk))
        cut = chance.randrange(len(talk[at]))
        talk[at : at + 1] = [talk[at][:cut], talk[at][cut:]]
        talk[:] = [piece for piece in talk if piece]

    async def scenario(server):
        return [await Wire(server).send(*talk) for talk in talks], len(server.heads)

    gate = FakeGate(tmp_path)
    answers, known = play(gate, scenario)
    assert (answers, 0) == play(gate, scenario, heads=Forgetful())
    assert 3 <= known < 10
    assert {*statuses(b"".join(answers))} >= {200, 400}


def test_tokens_are_looked_at_each_time(tmp_path):
    right, wrong = (post(request(), headers=f"Authorization: Bearer {token}\r\n") for token in ("s3cret", "S3cret"))

    async def scenario(server):
        wire = Wire(server)
        return await wire.send(right, wrong, right, wrong, GOOD, GOOD, right), len(server.heads)

    answers, known = play(FakeGate(tmp_path), scenario, token="s3cret")
    assert statuses(answers) == [200, 401, 200, 401, 401, 401, 200]
    assert known == 3


def test_limits_are_those_of_the_server(tmp_path):
    """What another server has learned is unknown here; what is refused is never learned."""

    async def scenario(server):
        large = post(BODY + 300 * b" ", headers=f"X: {300 * 'x'}\r\n")
        found = [await Wire(server).send(large) for _ in range(3)]
        return statuses(b"".join(found)), len(server.heads)

    gate = FakeGate(tmp_path)
    assert play(gate, scenario) == ([200] * 3, 1)
    assert play(gate, scenario, body_bytes=256) == ([413] * 3, 0)
    assert play(gate, scenario, header_bytes=256) == ([431] * 3, 0)


def test_not_ready_and_no_room_are_told(tmp_path):
    gate = FakeGate(tmp_path)

    async def scenario(server):
        wire = Wire(server)
        found = await wire.send(GOOD)
        idle, gate.models["m"].idle[:] = gate.models["m"].idle[:], []
        found += await wire.send(GOOD)
        gate.models["m"].idle[:] = idle
        gate.is_ready = False
        found += await wire.send(GOOD)
        gate.models, gate.is_ready = {}, True
        return found + await wire.send(GOOD)

    assert statuses(play(gate, scenario)) == [200, 503, 503, 404]


def test_a_server_that_drains_closes(tmp_path):
    async def scenario(server):
        wire = Wire(server)
        first = await wire.send(GOOD)
        server.front.is_draining = True
        return first, await wire.send(GOOD, GOOD), wire.is_closed

    first, last, is_closed = play(FakeGate(tmp_path), scenario)
    assert statuses(first + last) == [200, 200]
    assert b"Connection: close\r\n" not in first
    assert b"Connection: close\r\n" in last
    assert is_closed


def test_answers_leave_in_order(tmp_path):
    waiting = []
    gate = FakeGate(tmp_path, decide=waiting.append)

    async def scenario(server):
        wire = Wire(server)
        await wire.send(GOOD, OTHER, GOOD, OTHER)
        for ticket in reversed(waiting):
            assert wire.sent == b""
            gate.tell(ticket, copy_inputs(ticket))
        answers = await wire.send()
        await wire.send(GOOD)
        wire.connection.connection_lost(None)
        return [b'"id"' in part for part in answers.split(b"HTTP/1.1 200 OK\r\n")[1:]]

    assert play(gate, scenario) == [False, True, False, True]
    assert [ticket is waiting[4] for ticket in gate.cancelled] == [True]


@pytest.mark.parametrize("heads", [Heads(), Forgetful()])
def test_nothing_begins_while_answers_wait_to_be_read(tmp_path, heads):
    gate = FakeGate(tmp_path)

    async def scenario(server):
        wire = Wire(server)
        await wire.send(GOOD)
        wire.connection.pause_writing()
        paused = await wire.send(GOOD), len(gate.submitted), wire.is_reading
        wire.connection.resume_writing()
        return paused, await wire.send(), len(gate.submitted), wire.is_reading

    paused, answers, submitted, is_reading = play(gate, scenario, heads=heads)
    assert paused == (b"", 1, False)
    assert (statuses(answers), submitted, is_reading) == ([200], 2, True)


def test_how_many_are_remembered(tmp_path):
    async def scenario(server):
        wire, most = Wire(server), 0
        for number in range(3000):
            await wire.send(post(b"x", "/", f"X: {number}\r\n"))
            most = max(most, len(server.heads))
        return most

    assert play(FakeGate(tmp_path), scenario) == 1024
