"""What a server counts is what its clients have seen, whatever becomes of its processes."""

import asyncio
import time
import urllib.request
from collections import Counter

import pytest
from prometheus_client.parser import text_string_to_metric_families

from meshwright.serving.server.gate import Fate
from meshwright.serving.server.totals import NO_MODEL, Totals
from tests.serving.server.fakes import get
from tests.serving.server.servers import EMULATED, Load, ask_once, begin, connect, infer, serving

TOKEN = "Authorization: Bearer open-sesame\r\n"


def metrics(server):
    """Values by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.admin}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {(one.name, *sorted(one.labels.items())): one.value for family in families for one in family.samples}


def answers(server):
    """By model and status."""
    return {
        (dict(labels)["model"], int(dict(labels)["status"])): count
        for (name, *labels), count in metrics(server).items()
        if name == "meshwright_answers_total"
    }


def check_counted(server, look, expected):
    """What is counted becomes what is expected, and stays so."""
    server.wait_for(lambda _: look() == expected)
    server.wait_without()
    assert look() == expected


@pytest.mark.long
def test_refusals_are_counted_also_where_no_model_was_found(tmp_path):
    (tmp_path / "token").write_text("open-sesame\n")
    seen = {}

    def note(model, status):
        seen[model, status] = seen.get((model, status), 0) + 1

    with serving(tmp_path, EMULATED, "--token-file", str(tmp_path / "token")) as server:
        good = infer([(1, 2, 3)], headers=TOKEN)[0]
        for data in (
            get("/v2"),
            get("/v2/models/nobody", TOKEN),
            get("/v2/models/m/infer", TOKEN),
            get("/v2/models/m", TOKEN),
            b"nonsense\r\n\r\n",
        ):
            note("", ask_once(server, data)[0])
        note("m", ask_once(server, good)[0])
        assert seen == {("", 401): 1, ("", 404): 1, ("", 405): 1, ("", 200): 1, ("", 400): 1, ("m", 200): 1}
        assert server.wait_for(lambda status: status["models"][0]["statuses"])
        end = time.monotonic() + 60
        while ("", 503) not in seen:  # once, if the machine does not stall until there is another one
            server.kill("scheduler")
            while (status := ask_once(server, good)[0]) != 200:
                note("", status)
                assert time.monotonic() < end
                time.sleep(0.01)
            note("m", 200)
            assert time.monotonic() < end

        def counted():
            found = Counter(answers(server))
            # What the model had when the scheduler went is its own.
            found["", 503] += found.pop(("m", 503), 0)
            return found

        check_counted(server, counted, seen)


@pytest.mark.long
def test_what_clients_give_up_and_connections_too_many_are_counted(tmp_path):
    text = EMULATED.replace("1 ms", "20 s").replace('"5 s"', '"60 s"') + "[server]\nfronts = 1\nconnections = 3\n"

    async def main(server):
        clients = [await connect(server) for _ in range(5)]
        refused = [(await client.answer())[0] for client in clients[3:]]
        await begin(clients[0], infer([(1, 2, 3)])[0])
        for client in clients:
            client.close()
        return refused

    with serving(tmp_path, text) as server:
        assert asyncio.run(asyncio.wait_for(main(server), 30)) == [503] * 2
        server.wait_for(lambda status: status["cancelled_requests"])
        found = metrics(server)
        assert found["meshwright_cancelled_requests_total",] == 1
        assert found["meshwright_refused_connections_total",] == 2
        assert answers(server)["", 503] == 2


@pytest.mark.long
def test_no_count_falls_where_a_process_ends(tmp_path):
    with serving(tmp_path, EMULATED + "[server]\nfronts = 2\n") as server:

        def done():
            found = metrics(server)
            return [
                found.get(("meshwright_answers_total", ("model", "m"), ("status", "200"))),
                found.get(("meshwright_samples_total", ("fate", "done"), ("model", "m"))),
                found["meshwright_request_seconds_count", ("model", "m")],
            ]

        load = Load(server, 16)
        asyncio.run(asyncio.wait_for(load.run(requests=400), 60))
        assert load.counts == {200: 400}
        check_counted(server, done, [400] * 3)
        before = {key: count for key, count in metrics(server).items() if key[0].endswith(("total", "count", "sum"))}
        assert before["meshwright_answers_total", ("model", "m"), ("status", "200")] == 400
        for name in ("front-0", "front-1", "scheduler"):
            old = server.kill(name)
            server.wait_for(
                lambda status, old=old: status["ready"] and old not in {p["pid"] for p in status["processes"]}
            )
            after = metrics(server)
            assert [key for key in before if "process" not in key[0] and after[key] < before[key]] == []
        asyncio.run(asyncio.wait_for(load.run(requests=100), 60))
        assert load.counts[200] > 400
        check_counted(server, done, [load.counts[200]] * 3)


def test_reports_are_added_up():
    counts = {"statuses": {"200": 3, "503": 1}, "buckets": {"40": 2, "44": 1}, "latency_ns": 70}
    front = {"answers": [["a", counts], [NO_MODEL, {**counts, "buckets": {}}]], "cancelled": 2, "refused": 1}
    scheduler = {"fates": [["a", int(Fate.DONE), 5], ["b", int(Fate.LATE), 1]], "batches": [["a", 4]]}
    totals = Totals()
    for facts in (front, scheduler, {"kind": "worker"}, front):
        totals.add(facts)
    a = totals.models["a"]
    assert (a.statuses, a.buckets, a.latency_ns) == ({"200": 6, "503": 2}, {40: 4, 44: 2}, 140)
    assert (a.fates, a.num_batches, totals.models["b"].fates) == ({"done": 5}, 4, {"late": 1})
    assert totals.models[NO_MODEL].statuses == {"200": 6, "503": 2}
    assert (totals.cancelled, totals.refused) == (4, 2)
