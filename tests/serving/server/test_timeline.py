"""Timelines of real servers: each request goes through all of its phases, and what is drawn is what happened."""

import asyncio
import contextlib
import json
import re
import time
import urllib.error
import urllib.request
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from meshwright.cli.main import invoke
from meshwright.serving.policies.pool import RUN
from meshwright.serving.server.gate import Fate
from meshwright.serving.server.live import ARRIVE, WAKE
from meshwright.serving.server.recording import WIDTHS, Recorded, Recording, RecordingControl
from meshwright.serving.server.timeline import timeline_pieces
from meshwright.serving.server.timeline_facts import RecordedRun
from tests.serving.server.fakes import FakeGate, post, request
from tests.serving.server.fakes import run as run_http
from tests.serving.server.servers import EMULATED, Load, connect, infer, serving

pytestmark = pytest.mark.long  # the server takes seconds to start

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PHASES = ["front", "message", "queue", "device", "batch", "answer"]
MS = 1_000_000


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("timeline"), EMULATED, "--fronts", "2", "--policy", "adaptive") as server:
        yield server
        assert server.end() == 0


def fetch(server, path, headers=None, method="GET"):
    """Status, headers and body of the admin door's answer."""
    asked = urllib.request.Request(f"http://127.0.0.1:{server.admin}{path}", headers=headers or {}, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def is_recording(server):
    return fetch(server, "/timeline?seconds=0.1")[0] == 409


@contextlib.contextmanager
def while_recording(server, seconds):
    """A timeline is being recorded from here on, however busy the machine; its answer will be the result of this."""
    end = time.monotonic() + 60

    def record():
        while (answer := fetch(server, f"/timeline?seconds={seconds}"))[0] == 409:
            assert time.monotonic() < end
        return answer

    with ThreadPoolExecutor(1) as pool:
        recording = pool.submit(record)
        while not is_recording(server):
            if recording.done():  # it has gone by unseen, or has failed
                assert recording.result()[0] == 200
                recording = pool.submit(record)
            assert time.monotonic() < end
            time.sleep(0.1)
        yield recording


def recorded_meanwhile(server, do, *lengths):
    """How long was recorded, what was done meanwhile, and the timeline's answer: all was done before its end.

    On a busy machine it is done again, with the next of the lengths.
    """
    for seconds in lengths:
        with while_recording(server, seconds) as recording:
            result = do()
            is_within = is_recording(server)
        if is_within:
            return seconds, result, recording.result()
    raise AssertionError(lengths)


class Drawn:
    """A trace as Perfetto would have it; spans of a thread nest, arrows are whole and point forward."""

    def __init__(self, data):
        self.document = json.loads(data)
        self.told = self.document["otherData"]
        self.processes, self.threads, self.spans, self.instants = {}, {}, defaultdict(list), defaultdict(list)
        arrows = defaultdict(list)
        for event in self.document["traceEvents"]:
            place = event["pid"], event["tid"]
            if event["ph"] == "M" and event["name"] == "process_name":
                self.processes[event["pid"]] = event["args"]["name"]
            elif event["ph"] == "M" and event["name"] == "thread_name":
                self.threads[place] = event["args"]["name"]
            elif event["ph"] == "X":
                assert event["dur"] >= 0
                assert event["ts"] >= 0
                self.spans[place].append(event)
            elif event["ph"] == "i":
                self.instants[place].append(event)
            elif event["ph"] in "stf":
                arrows[event["id"]].append(event)
        for spans in self.spans.values():
            self.check_nesting(spans)
        for steps in arrows.values():
            assert [step["ph"] for step in steps] == ["s", "t", "f"]
            assert steps[0]["ts"] <= steps[1]["ts"] <= steps[2]["ts"]
            begin, middle, end = (self.at(step) for step in steps)
            assert begin["cat"].startswith("request")
            assert end["cat"].startswith("request")
            assert middle["args"]["batch"] in begin["args"]["batches"]
        self.num_arrows = len(arrows)

    def check_nesting(self, spans):
        ends = []
        for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
            while ends and ends[-1] <= span["ts"] + 1e-3:
                ends.pop()
            assert not ends or span["ts"] + span["dur"] <= ends[-1] + 2e-3, span
            ends.append(span["ts"] + span["dur"])

    def at(self, step):
        """The outermost span in which an arrow is."""
        return next(
            span
            for span in self.spans[step["pid"], step["tid"]]
            if span["cat"].startswith(("request", "batch"))
            and span["ts"] - 1e-3 <= step["ts"] <= span["ts"] + span["dur"] + 1e-3
        )

    def of(self, process, kind):
        """Spans of processes and a category."""
        return [
            span
            for (pid, _), spans in self.spans.items()
            for span in spans
            if self.processes[pid].startswith(process) and span["cat"].startswith(kind)
        ]

    def phases_of(self, request):
        place = request["pid"], request["tid"]
        end = request["ts"] + request["dur"] + 1e-3
        return [
            span
            for span in self.spans[place]
            if span["cat"] == "phase" and request["ts"] - 1e-3 <= span["ts"] and span["ts"] + span["dur"] <= end
        ]


def recorded(server, load, seconds=1.5, path="/timeline"):
    """A timeline of a server under load."""

    async def main():
        running = asyncio.create_task(load.run())
        await asyncio.sleep(0.3)
        try:
            return await asyncio.to_thread(fetch, server, f"{path}?seconds={seconds}")
        finally:
            load.stop()
            await running

    status, headers, data = asyncio.run(asyncio.wait_for(main(), 60))
    assert status == 200, data
    assert "attachment" in headers["content-disposition"]
    return Drawn(data)


def test_each_request_is_drawn_through_all_of_its_phases(server):
    load = Load(server, 12, rows=3)
    drawn = recorded(server, load)
    assert {*drawn.processes.values()} == {"scheduler", "device 0", "device 1", "front-0", "front-1"}
    assert (drawn.told["cut"], drawn.told["missing"]) == ([], [])
    assert drawn.told["seconds"] >= 1.5
    requests = [span for span in drawn.of("front", "request") if span["args"].get("status") == 200]
    assert len(requests) > 20
    whole = [span for span in requests if len(drawn.phases_of(span)) >= 5]
    assert len(whole) > len(requests) / 2
    for span in whole:
        phases = drawn.phases_of(span)
        names = [phase["name"] for phase in phases]
        assert names == [name for name in PHASES if name in names]
        assert sum(phase["dur"] for phase in phases) == pytest.approx(span["dur"], abs=0.01)
        assert span["name"] == "m"
        assert (span["args"]["fate"], span["args"]["samples"]) == ("done", 3)
        assert 4e6 < span["args"]["spare_us"] < 5e6
    batches = {span["args"]["batch"]: span for span in drawn.of("device", "batch")}
    assert len(batches) == drawn.told["batches"]
    for span in batches.values():
        args = span["args"]
        assert args["taken_us"] == pytest.approx(span["dur"], abs=0.01)
        # As the deployment says: 1 ms, and 20 us for each sample.
        assert args["expected_us"] == pytest.approx(1000 + 20 * args["samples"])
        assert span["name"] == f"m × {args['samples']}"
    assert {batch for span in whole for batch in span["args"]["batches"]} <= batches.keys()
    assert drawn.num_arrows >= len(whole)
    assert len(drawn.of("device", "model")) >= len(batches) - 2
    decided = [event for events in drawn.instants.values() for event in events if event["cat"] == "decision"]
    assert sum(event["args"]["samples"] for event in decided) >= 3 * len(whole)
    assert not list(server.folder().glob("recorded-*"))


def test_what_is_dropped_refused_given_up_or_under_way_is_drawn_too(server):
    async def main():
        clients = [await connect(server) for _ in range(4)]
        headers = f"traceparent: 00-{TRACE}-{PARENT}-00\r\ntracestate: rojo=1,congo=2\r\n"
        await clients[0].send(infer([(1, 2, 3)], headers=headers)[0])
        await clients[1].send(infer([(1, 2, 3)], parameters={"timeout": 200})[0])
        await clients[2].send(post({"inputs": []}, "/v2/models/m/infer"))
        answers = [await client.answer() for client in clients[:3]]
        # Computed for 1.3 ms at least; whoever goes before that is not answered.
        await clients[3].send(infer([(1, 2, 3)] * 64)[0])
        for client in clients:
            client.close()
        return answers

    _, answers, (status, _, data) = recorded_meanwhile(
        server, lambda: asyncio.run(asyncio.wait_for(main(), 60)), 1, 10, 30
    )
    assert status == 200
    drawn = Drawn(data)
    assert [answer[0] for answer in answers] == [200, 503, 400]
    requests = {span["name"]: span for span in drawn.of("front", "request")}
    assert requests.keys() >= {"m", "m: late", "m: refused"}
    args = requests["m"]["args"]
    assert (args["trace"], args["parent_span"], args["sampled"]) == (TRACE, PARENT, False)
    assert answers[0][1]["traceresponse"] == f"00-{TRACE}-{args['span']}-00"
    assert args["tracestate"] == {"rojo": "1", "congo": "2"}
    assert requests["m: late"]["args"]["spare_us"] < 0 or requests["m: late"]["args"]["status"] == 503
    assert requests["m: refused"]["args"] == {"fate": "refused", "samples": 1, "status": 400}


def test_one_timeline_at_a_time(server):
    def look():
        # Nothing is recorded by looking, and all else is answered meanwhile.
        others = [fetch(server, "/timeline?seconds=1", method="HEAD"), fetch(server, "/health")]
        return fetch(server, "/timeline?seconds=0.1"), [status for status, _, _ in others]

    seconds, ((status, headers, body), others), answer = recorded_meanwhile(server, look, 3, 10, 30)
    assert status == 409
    assert 1 <= int(headers["retry-after"]) <= seconds
    assert "is being recorded" in json.loads(body)["error"]
    assert others == [200, 200]
    assert answer[0] == 200
    assert fetch(server, "/timeline?seconds=0.1")[0] == 200


@pytest.mark.parametrize(
    "query",
    [
        *("seconds=0", "seconds=0.05", "seconds=31", "seconds=-1", "seconds=1e1", "seconds=nan", "seconds=inf"),
        *("seconds=", "seconds=x", "second=1", "seconds=1&seconds=1", "seconds=1&more=1", "seconds=%00", "x"),
    ],
)
def test_what_is_no_time_is_refused(server, query):
    status, _, body = fetch(server, f"/timeline?{query}")
    assert status == 400
    assert "second" in json.loads(body)["error"]


@pytest.mark.parametrize("path", ["/", "/dashboard.js", "/dashboard.css", "/status", "/timeline?seconds=0.1"])
def test_strangers_are_refused(server, path):
    assert fetch(server, path, {"Host": "example.org"})[0] == 403
    assert fetch(server, path, {"Host": f"example.org:{server.admin}"})[0] == 403
    status, headers, _ = fetch(server, path, {"Sec-Fetch-Site": "cross-site"})
    # A link may lead to the page, but no page may ask for what it says.
    assert status == (200 if path == "/" else 403)
    assert "default-src 'none'" in headers["content-security-policy"]
    assert fetch(server, path, {"Sec-Fetch-Site": "same-origin"}, method="POST")[0] == 405


@pytest.mark.long
def test_a_process_that_dies_meanwhile_is_told_of_though_another_one_has_taken_its_place(server):
    _, _, answer = recorded_meanwhile(server, lambda: server.wait_without(server.kill("worker-1")), 8, 20, 30)
    assert Drawn(answer[2]).told["missing"] == ["worker-1"]


@pytest.mark.long
def test_a_server_that_ends_does_not_wait_for_a_timeline(tmp_path):
    with serving(tmp_path) as server:
        with while_recording(server, 30) as recording:
            begin = time.monotonic()
            assert server.end() == 0
        assert time.monotonic() - begin < 20
        assert recording.result()[0] == 503
    assert "Traceback" not in server.text


@pytest.mark.long
def test_the_command_line_writes_it(server, tmp_path, capsys):
    url, out = f"http://127.0.0.1:{server.admin}", tmp_path / "timeline.json"
    assert invoke(["serve", "timeline", url, "--seconds", "0.2", "--out", str(out)]) == 0
    assert "0 requests" in capsys.readouterr().out
    Drawn(out.read_bytes())
    packed = tmp_path / "timeline.json.gz"
    assert invoke(["serve", "timeline", url, "--seconds", "0.2", "-o", str(packed)]) == 0
    assert packed.read_bytes()[:2] == b"\x1f\x8b"
    assert invoke(["serve", "timeline", f"http://127.0.0.1:{server.port}", "-o", str(out)]) == 1
    assert "admin port" in capsys.readouterr().err
    assert invoke(["serve", "timeline", url, "--seconds", "99", "-o", str(out)]) == 2
    assert invoke(["serve", "timeline", url, "-o", str(tmp_path / "x.txt")]) == 1
    assert ".json" in capsys.readouterr().err
    with while_recording(server, 5):
        assert invoke(["serve", "timeline", url, "-o", str(out)]) == 1
    assert "is being recorded" in capsys.readouterr().err


def test_the_command_line_says_that_nobody_is_there(tmp_path, capsys):
    assert invoke(["serve", "timeline", "http://127.0.0.1:1", "-o", str(tmp_path / "t.json")]) == 1
    assert "127.0.0.1:1" in re.sub(r"\s+", " ", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


# --- without processes -------------------------------------------------------------------------


def recording_of(path, most, **tables):
    recording = Recording(most)
    recording._note({name: np.array(rows, np.int64).ravel().tolist() for name, rows in tables.items()})
    recording.write(path)
    return Recorded(path)


def test_a_request_is_put_together_from_what_each_has_noted(tmp_path):
    """Two samples of one request, in batches of two workers; another one on its way."""
    slot, other, deadline = 7, 9, 100 * MS
    place = 3 << 32
    fronts = recording_of(
        tmp_path / "f",
        10,
        requests=[(10 * MS, 60 * MS, 200, Fate.DONE, 0, 3, deadline, 2, -1)],
        slots=[slot, other],
        flushes=[(12 * MS, 3, 2), (55 * MS, 3, 1)],
        flushed=[(0, slot, deadline), (0, other, deadline), (0, slot, 2 * deadline)],
    )
    scheduler = recording_of(
        tmp_path / "s",
        10,
        events=[
            *[(ARRIVE, 13 * MS, 0, place | each, deadline, 0) for each in (slot, other)],
            (WAKE, 14 * MS, 0, 0, 0, 0),
            (ARRIVE, 56 * MS, 0, place | slot, 2 * deadline, 0),
        ],
        decisions=[(15 * MS, RUN, 0, 0, 1), (20 * MS, RUN, 1, 0, 1), (57 * MS, RUN, 0, 0, 1)],
        chosen=[place | slot, place | other, place | slot],
    )
    first = recording_of(
        tmp_path / "a",
        10,
        batches=[(0, 0, 5 * MS, 18 * MS, 25 * MS, 1)],
        samples=[(place | slot, deadline, 0)],
        runs=[(19 * MS, 24 * MS)],
    )
    second = recording_of(
        tmp_path / "b", 10, batches=[(1, 0, 5 * MS, 21 * MS, 50 * MS, 1)], samples=[(place | other, deadline, 0)]
    )
    processes = {"front-0": fronts, "scheduler": scheduler, "worker-0": first, "worker-10": second}
    facts = RecordedRun(begin_ns=0, end_ns=70 * MS, models=["<m>"], processes=processes)
    drawn = Drawn(b"".join(timeline_pieces(facts)))
    done, under_way = drawn.of("front", "request")
    assert (done["name"], done["ts"], done["dur"]) == ("<m>", 10_000, 50_000)
    assert (done["args"]["batches"], done["args"]["devices"], done["args"]["spare_us"]) == ([0, 1], [0, 10], 40_000)
    assert [(phase["name"], phase["dur"]) for phase in drawn.phases_of(done)] == [
        *[("front", 2000), ("message", 1000), ("queue", 2000), ("device", 3000)],
        *[("batch", 32_000), ("answer", 10_000)],
    ]
    assert (under_way["name"], under_way["ts"], under_way["dur"]) == ("<m>: under way", 55_000, 15_000)
    assert [(phase["name"], phase["dur"]) for phase in drawn.phases_of(under_way)] == [
        *[("message", 1000), ("queue", 1000), ("device", 13_000)]
    ]
    assert drawn.num_arrows == 2
    assert [span["args"]["over_expected_us"] for span in drawn.of("device", "batch")] == [2000, 24_000]


def test_a_batch_that_ends_late_or_passes_over_is_seen_so(tmp_path):
    worker = recording_of(
        tmp_path / "w",
        10,
        batches=[(4, 0, 5 * MS, 10 * MS, 20 * MS, 4)],
        samples=[(1, 30 * MS, 0), (2, 19 * MS, 0), (3, 1 * MS, 1), (4, 30 * MS, 2)],
    )
    facts = RecordedRun(begin_ns=0, end_ns=70 * MS, models=["m"], processes={"worker-0": worker}, missing=["front-0"])
    drawn = Drawn(b"".join(timeline_pieces(facts)))
    (span,) = drawn.of("device", "batch")
    assert span["name"] == "m × 4, 1 late, 1 passed over, 1 failed"
    assert span["cat"] == "batch,late"
    assert drawn.told["missing"] == ["front-0"]


def test_no_more_is_kept_than_was_asked_for(tmp_path):
    recording = Recording(3)
    for place in range(10):
        recording.rows_of_flush(1, [0, place, 1] * 5)
        recording.row_of_run(place, place)
    recording.write(tmp_path / "r")
    found = Recorded(tmp_path / "r")
    assert found.is_cut
    # Rows that belong together are kept together.
    assert found["flushes"][:, 2].sum() == len(found["flushed"]) == 15
    assert len(found["runs"]) == 3
    assert all(found[name].shape == (0, WIDTHS[name]) for name in WIDTHS.keys() - {"flushes", "flushed", "runs"})


def test_orders_set_and_unset_what_notes(tmp_path):
    part = SimpleNamespace(recording=None)
    recorder = RecordingControl(lambda: [part, None])
    recorder.obey([{"another": 1}])
    assert part.recording is None
    recorder.obey([{"record": 5}])
    assert part.recording is not None
    recorder.obey([{"deliver": str(tmp_path / "r")}])
    assert part.recording is None
    # A process that was not there when it began has nothing, and says so; a folder that has gone matters to nobody.
    recorder.obey([{"deliver": str(tmp_path / "q")}, {"deliver": str(tmp_path / "none" / "q")}])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["q", "r"]


def test_a_front_notes_each_request_once(tmp_path):
    """What was asked wrongly, what cannot be reserved, what is done, what is dropped."""
    fates = iter([Fate.DONE, Fate.FULL, Fate.FAILED])
    gate = FakeGate(tmp_path, decide=lambda _: next(fates))
    recording = Recording(100)

    async def scenario(server, connect):
        server.front.recording = recording
        client = await connect()
        good = post(request())
        parts = (
            good,
            good,
            good,
            post({}),
            post(request(), "/v2/models/none/infer"),
            post(b"", "/v2/repository/index"),
        )
        return [(await client.ask(part))[0] for part in parts]

    assert run_http("uvloop", gate, scenario) == [200, 503, 500, 400, 404, 200]
    rows = np.array(recording.tables["requests"]).reshape(-1, WIDTHS["requests"])
    assert rows[:, 2].tolist() == [200, 503, 500, 400]
    assert rows[:, 3].tolist() == [Fate.DONE, Fate.FULL, Fate.FAILED, -1]
    assert len(recording.tables["slots"]) == 3
    assert (rows[:, 1] >= rows[:, 0]).all()
