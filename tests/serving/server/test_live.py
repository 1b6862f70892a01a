"""Live events through policies: nothing is lost, and a log is decided again as it was."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.serving.policies.pool import DROP, LEVEL_BIT, NEVER, RUN, SLACK
from meshwright.serving.server.decision_log import LogFile, check_log
from meshwright.serving.server.live import (
    ADJUST,
    ARRIVE,
    CANCEL,
    DOWN,
    EVENT_WIDTH,
    FREE,
    UP,
    WAKE,
    Live,
)
from meshwright.serving.server.replay import replay_log
from meshwright.spec import ServingError
from tests.marks import left_to_ci

MS = 1_000_000
POLICIES = ["symphony", *left_to_ci("adaptive:trial=1", "eager", "nexus", "clockwork", "timeouts:wait=2", "aimd")]
MODELS, DEVICES = 3, 4


def facts(delay_ns=0):
    table = [0] + [2 * MS + MS // 2 * size for size in range(1, 17)]
    return {
        "latency": [table, table, table[:5] + [NEVER] * 12],
        "slo": [20 * MS] * MODELS,
        "num_devices": DEVICES,
        "capacity": 256,
        "delay_ns": delay_ns,
        "slack_ns": 0,
    }


def rows(*events):
    return np.array([[*event, *[0] * (EVENT_WIDTH - len(event))] for event in events], np.int64)


class Devices:
    """What a driver does: it runs what it is told to, and tells of ends."""

    def __init__(self, live):
        self.live, self.batches, self.up = live, {device: [] for device in range(DEVICES)}, set()
        self.sent, self.fates, self.levels = {}, {}, {}

    def take(self, *events):
        for decisions, chosen in self.live.take(rows(*events)):
            for kind, target, queue, first, count, _ in decisions.tolist():
                requests = chosen[first : first + count].tolist()
                if kind == RUN and target not in self.up:
                    # Decided in the call that told of its end, and before.
                    self.arrive(requests, self.gone_at)
                elif kind == RUN:
                    assert len(self.batches[target]) < 2
                    self.batches[target].append((queue, requests))
                elif kind == DROP:
                    self.settle(requests, "dropped")

    def settle(self, requests, fate):
        for request in requests:
            assert request not in self.fates
            self.fates[request] = fate

    def arrive(self, requests, now):
        said = ((one, one | self.levels.get(one, 0) << LEVEL_BIT) for one in requests)
        self.take(*((ARRIVE, now, self.sent[one][0], request, self.sent[one][1]) for one, request in said))

    def bring_up(self, device, now):
        if device not in self.up:
            self.up.add(device)
            self.take((UP, now, device))

    def take_down(self, device, now):
        # Nexus learns of devices at its next epoch only.
        if device in self.up and len(self.up) > 1 and "Nexus" not in type(self.live.policy).__name__:
            self.up.discard(device)
            self.gone_at = now
            lost, self.batches[device] = self.batches[device], []
            self.take((DOWN, now, device))
            for _, requests in lost:
                self.arrive(requests, now)

    def end(self, device, now):
        if self.batches[device]:
            self.settle(self.batches[device].pop(0)[1], "done")
            queue, requests = (self.batches[device] or [(0, [])])[0]
            self.take((FREE, now, device, queue % MODELS, len(requests), MS))

    def step(self, kind, number, now):
        device = number % DEVICES
        match kind:
            case "arrive":
                burst = range(len(self.sent), len(self.sent) + number % 40)
                self.sent |= {request: (request % MODELS, now + 20 * MS) for request in burst}
                self.levels |= {request: (number // 40 + request) % 7 - 3 for request in burst if number % 2}
                self.arrive(burst, now)
            case "cancel" if self.sent:
                request = number % len(self.sent)
                self.take((CANCEL, now, self.sent[request][0], request, self.sent[request][1]))
            case "end":
                self.end(device, now)
            case "wake":
                self.take((WAKE, now))
            case "adjust":
                self.take((ADJUST, now, SLACK, number % MS))
            case "down":
                self.take_down(device, now)
            case "up":
                self.bring_up(device, now)

    def finish(self, now):
        """All that is left gets its fate in time."""
        for _ in range(10_000):
            if len(self.fates) == len(self.sent):
                return
            now += MS
            self.take((WAKE, now))
            for device in sorted(self.up):
                self.end(device, now)


step = st.tuples(
    st.sampled_from(["arrive"] * 8 + ["end"] * 4 + ["wake", "cancel", "up", "down", "adjust"]),
    st.integers(0, 3 * MS),
    st.integers(0, 10**6),
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=15, deadline=None)
@given(steps=st.lists(step, max_size=200))
def test_every_request_has_one_fate_and_the_log_is_decided_again(policy, steps, tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "decisions"
    with path.open("wb") as log:
        driver = Devices(Live(policy, facts(), log))
        for device in range(DEVICES):
            driver.bring_up(device, 0)
        now = 0
        for kind, wait, number in steps:
            now += wait
            driver.step(kind, number, now)
        driver.finish(now)
    assert driver.fates.keys() == driver.sent.keys()
    events, _ = replay_log(path)
    assert events >= DEVICES


def test_thousands_of_events_at_once_are_taken_in_parts():
    live = Live("eager", {**facts(), "capacity": 16})
    live.take(rows(*((UP, 0, device) for device in range(DEVICES))))
    taken = live.take(rows(*((ARRIVE, MS, number % 2, number, 5 * MS) for number in range(5000))))
    assert len(taken) > 1
    fates = np.concatenate([chosen for _, chosen in taken])
    assert len(fates) == len(set(fates.tolist())) >= 5000 - 2 * 16


def test_a_log_that_says_otherwise_is_told(tmp_path):
    path = tmp_path / "log"
    with path.open("wb") as log:
        live = Live("eager", facts(), log)
        live.take(rows((UP, 0, 0)))
        live.take(rows((ARRIVE, 5, 0, 77, 20 * MS)))
    assert replay_log(path) == (2, 1)
    data = path.read_bytes()
    # The last cell is the request that was chosen.
    path.write_bytes(data[:-8] + (78).to_bytes(8, "little"))
    with pytest.raises(ServingError, match="after 1 events the policy decides differently"):
        replay_log(path)
    path.write_bytes(data[:-3])
    assert replay_log(path) == (1, 0)
    path.write_text("no log\n")
    with pytest.raises(ServingError, match="is not a log of decisions"):
        replay_log(path)
    header = json.loads(data.partition(b"\n")[0])
    path.write_bytes(json.dumps({**header, "kind": "another"}).encode() + b"\n")
    with pytest.raises(ServingError, match="is not a log of decisions"):
        replay_log(path)


def logged(path, policy="eager"):
    """A log of three calls, with the place where each begins."""
    starts = []
    with path.open("wb") as log:
        live = Live(policy, facts(), log)
        for events in ([(UP, 0, 0)], [(ARRIVE, 5, 0, 77, 20 * MS)], [(FREE, 9 * MS, 0, 0, 0, MS)]):
            starts.append(log.tell())
            live.take(rows(*events))
    return path.read_bytes(), starts


@pytest.mark.parametrize(
    ("call", "cell", "value", "words"),
    [
        (1, 0, -7, "after 1 events, the numbers of events and decisions are out of range"),
        (2, 1, 2**40, "after 2 events, the numbers of events and decisions are out of range"),
        (0, 3, 99, "after 0 events, an event is of an unknown kind"),
        (0, 5, DEVICES, "after 0 events, an event is out of range"),
        (0, 5, -(10**12), "after 0 events, an event is out of range"),
        (1, 5, MODELS, "after 1 events, an event is out of range"),
        (2, 6, 10**15, "after 2 events, an event is out of range"),
        (2, 7, 17, "after 2 events, an event is out of range"),
        (2, 4, -1, "after 2 events, an event is out of range"),
    ],
)
def test_a_damaged_log_is_told_before_a_policy_sees_it(tmp_path, call, cell, value, words):
    data, starts = logged(tmp_path / "log")
    at = starts[call] + 8 * cell
    (tmp_path / "log").write_bytes(data[:at] + value.to_bytes(8, "little", signed=True) + data[at + 8 :])
    with pytest.raises(ServingError, match=words):
        replay_log(tmp_path / "log")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("num_devices", -3),
        ("num_devices", 10**12),
        ("capacity", 10**12),
        ("slo", "x"),
        ("latency", [[1]]),
        ("slo", [1]),
    ],
)
def test_facts_that_no_pool_can_have_are_told_before_it_is_made(tmp_path, kind, value):
    data, starts = logged(tmp_path / "log")
    header = json.loads(data[: starts[0]])
    header["facts"][kind] = value
    (tmp_path / "log").write_bytes(json.dumps(header).encode() + b"\n" + data[starts[0] :])
    with pytest.raises(ServingError, match="is not a log of decisions"):
        replay_log(tmp_path / "log")


@pytest.mark.parametrize("measured", [[1], {"rate": [1, 2, 3, 4]}, {"foo": [1]}, {"slowness": ["a"] * DEVICES}])
def test_measurements_of_other_devices_are_told(tmp_path, measured):
    data, starts = logged(tmp_path / "log")
    header = {**json.loads(data[: starts[0]]), "measured": measured}
    (tmp_path / "log").write_bytes(json.dumps(header).encode() + b"\n" + data[starts[0] :])
    with pytest.raises(ServingError, match="is not a log of decisions"):
        replay_log(tmp_path / "log")


def test_a_log_may_end_anywhere_in_its_last_call(tmp_path):
    data, starts = logged(tmp_path / "log")
    for end in range(starts[2], len(data)):
        (tmp_path / "log").write_bytes(data[:end])
        assert replay_log(tmp_path / "log")[0] == 2


def test_a_log_on_a_full_disk_is_told_once_and_decisions_go_on(capsys):
    log = LogFile(Path("/dev/full"))
    live = Live("eager", facts(), log)
    for device in range(DEVICES):
        live.take(rows((UP, 0, device)))
    for number in range(500):
        live.take(rows((ARRIVE, MS, 0, number, 20 * MS)))
    log.close()
    assert capsys.readouterr().out.count("No space left on device") == 1


def test_what_a_log_must_not_replace(tmp_path):
    logged(tmp_path / "log")
    (tmp_path / "text").write_text("mine\n")
    (tmp_path / "empty").write_text("")
    for name in ("log", "empty", "new"):
        check_log(tmp_path / name)
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "log").stat().st_size
    for name, words in (
        ("text", "not a log of decisions"),
        (".", "is a folder"),
        ("no/log", "not a folder"),
        ("text/x", "not a folder"),
    ):
        with pytest.raises(ServingError, match=words):
            check_log(tmp_path / name)
    assert (tmp_path / "text").read_text() == "mine\n"


def test_a_plain_policy_is_taken_too(tmp_path):
    (tmp_path / "mine.py").write_text(
        "class Mine:\n"
        "    def arrive(self, pool, now, queue, request, deadline):\n"
        "        pool.enter(queue, request, deadline)\n"
        "        self.go(pool)\n"
        "    def free(self, pool, now, device):\n"
        "        self.go(pool)\n"
        "    def go(self, pool):\n"
        "        for queue in range(pool.num_queues):\n"
        "            for device in pool.idle_devices:\n"
        "                if pool.length(queue):\n"
        "                    pool.run(queue, 1, device)\n"
    )
    live = Live(f"{tmp_path / 'mine.py'}:Mine", facts())
    live.take(rows((UP, 0, 1)))
    ((decisions, chosen),) = live.take(rows((ARRIVE, 3, 2, 9, 20 * MS)))
    assert decisions[0, :3].tolist() == [RUN, 1, 2]
    assert chosen.tolist() == [9]
