"""The server as a browser and as a stranger see it: a real client against the real server."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from meshwright.planner import predict_step_interval
from meshwright.playground import PlaygroundServer, Service, from_query, to_query
from meshwright.playground import page_server as server_module
from meshwright.spec import Plan, PlaygroundError, decode_document
from tests.playground.examples import make_bench, make_state


@contextmanager
def running(bench=None):
    server = PlaygroundServer(Service(bench or make_bench(), make_state()))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.service.close()
        server.server_close()
        thread.join(5)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def server():
    with running() as started:
        yield started


def ask(server, method, path, body=None, **headers):
    """One request; status, headers and body. A header of None is left out."""
    sent = {"Host": f"127.0.0.1:{server.server_port}"}
    if method == "POST":
        sent |= {"Origin": f"http://127.0.0.1:{server.server_port}", "Content-Type": "application/json"}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        data = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else b""
        if method == "POST":
            sent = {"Content-Length": str(len(data)), **sent}
        for name, value in sent.items():
            if value is not None:
                connection.putheader(name, value)
        connection.endheaders(data)
        reply = connection.getresponse()
        return reply.status, dict(reply.getheaders()), reply.read()
    finally:
        connection.close()


def question(state=None, **more):
    return {"query": to_query(state or make_state()), "pinned": "", "page": "test", "number": 0, **more}


@pytest.mark.parametrize("path", ["/", "/playground.js", "/playground.css", "/views.js", "/views.css", "/options"])
def test_the_page_and_its_files_are_there_and_may_load_nothing_else(server, path):
    status, headers, body = ask(server, "GET", path)
    assert status == 200
    assert body
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "http" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Server"] == "meshwright"


def test_the_page_names_no_file_but_its_own(server):
    _, _, body = ask(server, "GET", "/")
    text = body.decode()
    assert "http" not in text.replace("http-equiv", "")
    assert "<script>" not in text
    assert "style=" not in text


def test_the_server_listens_on_this_machine_only(server):
    assert server.socket.getsockname()[0] == "127.0.0.1"


def test_an_answer_is_the_state_asked_for(server):
    status, _, body = ask(server, "POST", "/answer", question(make_state(num_stages=3)))
    data = json.loads(body)
    assert status == 200
    assert data["status"] == "fits"
    assert from_query(data["query"]) == make_state(num_stages=3)
    assert data["figures"]["step_time_s"] == make_bench().answer(make_state(num_stages=3)).simulation.step_time_s
    assert data["answered_in_s"] >= 0


def test_a_pinned_state_comes_with_the_answer(server):
    pinned = to_query(make_state(slowdown=100.0))
    data = json.loads(ask(server, "POST", "/answer", question(pinned=pinned))[2])
    assert data["pinned"]["figures"]["step_time_s"] > data["figures"]["step_time_s"]
    assert "gains" in data["pinned"]["difference"]
    broken = json.loads(ask(server, "POST", "/answer", question(pinned=to_query(make_state(num_stages=99))))[2])
    assert "at most 12 stages" in broken["pinned"]["message"]
    assert broken["status"] == "fits"


@pytest.mark.parametrize(
    ("pinned", "wrong"), [("stages=-3", "stages = '-3'"), ("garbage", "link"), ("a=1", "is not a control")]
)
def test_a_pinned_link_that_cannot_be_read_leaves_the_answer_as_it_is(server, pinned, wrong):
    data = json.loads(ask(server, "POST", "/answer", question(pinned=pinned))[2])
    assert data["status"] == "fits"
    assert data["pinned"]["query"] == pinned
    assert wrong in data["pinned"]["message"]


def test_a_state_without_a_plan_is_answered_with_what_to_change(server):
    status, _, body = ask(server, "POST", "/answer", question(make_state(num_stages=99)))
    assert status == 200
    data = json.loads(body)
    assert data["status"] == "impossible"
    assert "at most 12 stages" in data["message"]


def test_a_bad_link_is_answered_with_what_is_wrong(server):
    data = json.loads(ask(server, "POST", "/answer", question(query="stages=%3Cscript%3E"))[2])
    assert data["status"] == "impossible"
    assert "whole number" in data["message"]


def test_a_plan_is_saved_as_a_document_that_reads_back(server):
    status, headers, body = ask(server, "GET", f"/plan.json?{to_query(make_state(num_stages=2))}")
    assert status == 200
    assert headers["Content-Disposition"] == 'attachment; filename="plan.json"'
    plan = decode_document(Plan, json.loads(body), "plan.json")
    assert plan == make_bench().answer(make_state(num_stages=2)).plan


def test_a_trace_and_a_report_are_saved(server):
    _, _, trace = ask(server, "GET", f"/trace.json?{to_query(make_state())}")
    timeline = make_bench().answer(make_state()).simulation.timeline
    events = json.loads(trace)["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == timeline.num_spans
    status, headers, report = ask(server, "GET", f"/report.html?{to_query(make_state())}")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"chain on 2x8xA100" in report


def test_files_of_a_state_without_a_plan_are_refused_in_words(server):
    status, headers, body = ask(server, "GET", f"/plan.json?{to_query(make_state(num_stages=99))}")
    assert (status, headers["Content-Type"]) == (400, "text/plain; charset=utf-8")
    assert b"at most 12 stages" in body
    assert ask(server, "GET", "/report.html?stages=%3Cscript%3E")[0] == 400


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1:1", "[::1]:{port}", "", None])
@pytest.mark.parametrize(("method", "path"), [("GET", "/"), ("GET", "/options"), ("POST", "/answer")])
def test_another_name_for_this_server_is_refused(server, host, method, path):
    host = host and host.format(port=server.server_port)
    status, _, body = ask(server, method, path, question(), Host=host)
    assert status == 403
    assert b"127.0.0.1" in body


def test_localhost_is_a_name_of_this_server(server):
    assert ask(server, "GET", "/", Host=f"localhost:{server.server_port}")[0] == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:1", "https://127.0.0.1:{port}", None]
)
def test_a_request_from_another_page_is_refused(server, origin):
    origin = origin and origin.format(port=server.server_port)
    assert ask(server, "POST", "/answer", question(), Origin=origin)[0] == 403


def test_another_site_may_link_to_the_page_but_not_ask(server):
    assert ask(server, "GET", "/?stages=2", Sec_Fetch_Site="cross-site")[0] == 200
    for path in ("/options", f"/plan.json?{to_query(make_state())}", "/views.js"):
        assert ask(server, "GET", path, Sec_Fetch_Site="cross-site")[0] == 403


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "/../../etc/passwd",
        "//etc/passwd",
        "/%2e%2e/",
        "/playground.html",
        "/index.html",
        "/options/",
        "/x" * 900,
    ],
)
def test_no_other_path_leads_anywhere(server, path):
    assert ask(server, "GET", path)[0] == 404
    assert ask(server, "POST", path, {})[0] == 404


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "NONSENSE"])
def test_no_other_method_is_answered(server, method):
    assert ask(server, method, "/")[0] == 501


@pytest.mark.parametrize(("path", "status"), [("/", 200), ("/options", 200), ("/nothing", 404)])
def test_head_is_get_without_its_body(server, path, status):
    got, headers, body = ask(server, "GET", path)
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as raw:
        raw.sendall(
            f"HEAD {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\nConnection: close\r\n\r\n".encode()
        )
        head, _, rest = raw.makefile("rb").read().partition(b"\r\n\r\n")
    assert (got, rest) == (status, b"")
    assert head.split()[1] == str(status).encode()
    assert headers["Content-Length"] == str(len(body))
    assert f"Content-Length: {len(body)}".encode() in head


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"[" * 60_000, {}, 400),
        (b"[]", {}, 400),
        (b'"text"', {}, 400),
        (b"\xff\xfe", {}, 400),
        (b"{}", {"Content-Type": "text/plain"}, 415),
        (b"{}", {"Content-Type": None}, 415),
        (b"{}", {"Content-Length": None}, 411),
        (b"{}", {"Content-Length": "-1"}, 411),
        (b"{}", {"Content-Length": "99999999999999"}, 413),
        (b"{}", {"Content-Length": "70000"}, 413),
        (b"{}", {"Transfer-Encoding": "chunked"}, 411),
        (b"{}", {}, 400),
        (json.dumps({"query": 1}).encode(), {}, 400),
        (json.dumps(question(number=-1)).encode(), {}, 400),
        (json.dumps(question(number=1.5)).encode(), {}, 400),
        (json.dumps(question(number=True)).encode(), {}, 400),
        (json.dumps(question(page=None)).encode(), {}, 400),
        (json.dumps(question(pinned=["x"])).encode(), {}, 400),
        (json.dumps(question(query="x" * 20_000)).encode(), {}, 400),
    ],
)
def test_a_body_that_is_no_request_is_refused(server, body, headers, status):
    found, _, text = ask(server, "POST", "/answer", body, **headers)
    assert found == status
    assert json.loads(text)["message"]
    assert b"Traceback" not in text


def test_words_that_are_no_http_end_the_connection_and_nothing_else(server):
    for text in (
        b"\x00\xff\n\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 500 + b"\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as raw:
            raw.sendall(text)
            raw.shutdown(socket.SHUT_WR)
            assert b"Traceback" not in raw.recv(100_000)
    assert ask(server, "GET", "/")[0] == 200


def test_a_defect_is_an_answer_with_a_status(monkeypatch):
    bench = make_bench()
    monkeypatch.setattr(bench, "answer", lambda state: 1 // 0)
    with running(bench) as server:
        status, _, body = ask(server, "POST", "/answer", question())
        assert status == 500
        assert "ZeroDivisionError" in json.loads(body)["message"]


@pytest.mark.long
def test_a_silent_connection_is_closed_and_too_many_are_not_taken(monkeypatch):
    monkeypatch.setattr(server_module._Handler, "timeout", 0.3)
    with running() as server:
        silent = [
            socket.create_connection(("127.0.0.1", server.server_port), timeout=10)
            for _ in range(server_module.MAX_CONNECTIONS)
        ]
        time.sleep(0.1)
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as late:
            assert late.recv(10) == b""
        for connection in silent:
            assert connection.recv(10) == b""
            connection.close()
        assert ask(server, "GET", "/")[0] == 200


def test_a_body_that_does_not_come_in_time_ends_the_connection(monkeypatch):
    monkeypatch.setattr(server_module._Handler, "timeout", 0.4)
    with running() as server:
        own = f"127.0.0.1:{server.server_port}"
        head = (
            f"POST /answer HTTP/1.1\r\nHost: {own}\r\nOrigin: http://{own}\r\n"
            "Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
        )
        for drops in (0, 12):
            with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as raw:
                begin = time.monotonic()
                raw.sendall(head.encode())
                raw.settimeout(0.1)
                for _ in range(drops):
                    raw.sendall(b" ")
                    try:
                        assert raw.recv(10) == b""
                        break
                    except TimeoutError:
                        continue
                else:
                    assert not drops, "A body that drips in kept its connection."
                    raw.settimeout(10)
                    assert raw.recv(10) == b""
                assert time.monotonic() - begin < 5
        assert ask(server, "POST", "/answer", question())[0] == 200


def test_a_port_that_is_taken_is_an_error_with_the_remedy(server):
    with pytest.raises(PlaygroundError, match=f"Port {server.server_port} is in use"):
        PlaygroundServer(Service(make_bench(), make_state()), server.server_port)


def test_of_a_page_only_the_newest_waiting_request_is_computed(monkeypatch):
    bench = make_bench()
    computed, may_go, answer = [], threading.Event(), bench.answer

    def slow(state):
        computed.append(state.num_stages)
        assert may_go.wait(10)
        return answer(state)

    monkeypatch.setattr(bench, "answer", slow)
    with running(bench) as server:
        replies: dict[int, str] = {}

        def send(number, page="test"):
            data = question(make_state(num_stages=number), number=number, page=page)
            replies[number] = json.loads(ask(server, "POST", "/answer", data)[2])["status"]

        threads = []
        for number, page in ((1, "test"), (2, "test"), (3, "test"), (4, "test"), (5, "another")):
            threads.append(threading.Thread(target=send, args=(number, page)))
            threads[-1].start()
            time.sleep(0.1)
        may_go.set()
        for thread in threads:
            thread.join(10)
    assert replies == {1: "fits", 2: "stale", 3: "stale", 4: "fits", 5: "fits"}
    assert sorted(computed) == [1, 4, 5]


def follow(server, job, until):
    for _ in range(400):
        report = json.loads(ask(server, "POST", "/progress", {"job": job})[2])
        if until(report):
            return report
        time.sleep(0.02)
    raise AssertionError(report)


def test_a_search_finds_plans_that_are_states(server):
    state = make_state(num_nodes=1, devices_per_node=4, global_batch=8, slowdown=2.0, slow_rank=3)
    job = json.loads(ask(server, "POST", "/search", {"query": to_query(state)})[2])["job"]
    report = follow(server, job, lambda report: report["status"] != "running")
    assert report["status"] == "done"
    bench = make_bench()
    for row in report["rows"]:
        found = from_query(row["query"])
        assert (found.slowdown, found.slow_rank) == (2.0, 3)
        assert bench.answer(found).simulation.step_time_s == row["step_time_s"]
    assert [row["place"] for row in report["rows"]] == list(range(1, len(report["rows"]) + 1))


def test_a_search_that_finds_nothing_says_why(server):
    state = make_state(num_nodes=1, devices_per_node=2, global_batch=4, memory_gib=1e-5)
    job = json.loads(ask(server, "POST", "/search", {"query": to_query(state)})[2])["job"]
    report = follow(server, job, lambda report: report["status"] != "running")
    assert report["status"] == "failed"
    assert "No plan fits into memory" in report["message"]


def test_a_search_can_be_stopped_and_a_new_one_takes_its_place(server):
    large = make_state(num_nodes=8, devices_per_node=8, global_batch=1024)
    first = json.loads(ask(server, "POST", "/search", {"query": to_query(large)})[2])["job"]
    follow(server, first, lambda report: report["done"] > 0 or report["status"] != "running")
    assert json.loads(ask(server, "POST", "/stop", {"job": first})[2])["status"] in ("running", "stopped")
    assert follow(server, first, lambda report: report["status"] != "running")["status"] == "stopped"
    second = json.loads(ask(server, "POST", "/search", {"query": to_query(large)})[2])["job"]
    third = json.loads(ask(server, "POST", "/search", {"query": to_query(large)})[2])["job"]
    assert third > second > first
    body = ask(server, "POST", "/progress", {"job": second})[2]
    assert "a later search replaced it" in json.loads(body)["message"]
    ask(server, "POST", "/stop", {"job": third})


def test_the_interval_of_a_step_is_asked_for_apart(server):
    state = make_state(num_stages=3, slowdown=2.0)
    data = json.loads(ask(server, "POST", "/interval", {"query": to_query(state)})[2])
    seen = make_bench().answer(state).seen
    found = predict_step_interval(seen.plan, seen.graph, seen.cluster, seen.cost)
    assert data["status"] == "interval"
    assert (data["low_s"], data["high_s"]) == (found.low_s, found.high_s)
    assert "80 % interval" in data["words"]
    impossible = json.loads(ask(server, "POST", "/interval", {"query": to_query(make_state(num_stages=99))})[2])
    assert impossible["status"] == "impossible"


def test_a_search_keeps_what_the_controls_say_of_states_and_shows_its_plans(server):
    state = make_state(num_nodes=1, devices_per_node=4, zero=1, schedule="zb-h1", global_batch=16)
    report = json.loads(ask(server, "POST", "/search", {"query": to_query(state)})[2])
    while report["status"] == "running":
        time.sleep(0.05)
        report = json.loads(ask(server, "POST", "/progress", {"job": report["job"]})[2])
    assert report["status"] == "done"
    for row in report["rows"]:
        assert from_query(row["query"]).zero == 1
        answer = json.loads(ask(server, "POST", "/answer", {"query": row["query"], "page": "q", "number": 1})[2])
        assert answer["figures"]["step_time_s"] == row["step_time_s"]
