"""A sharded scheduler: its mailboxes between threads, its parts apart and replayed, and all of it beside one pool."""

import itertools
import re
import threading
import time
from collections import Counter, deque

import numba
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scheduler_parts import PolicyShard, Rank, allocate_mailboxes, receive_rows

from meshwright.compiled import compiled
from meshwright.serving import load_policy, simulate_deployment
from meshwright.serving.policies.pool import DROP, NUM_IDLE, RUN
from meshwright.serving.policies.sharding import ARRIVE, CANDIDATE, GRANT, TAKEN, UNUSED
from meshwright.serving.policies.sharding.mailboxes import WIDTH, cells_of_mailbox, receive, room_in, send
from meshwright.serving.policies.sharding.policy import Sharded
from meshwright.spec import Deployment, Outage, ServingError, Straggler
from tests.marks import examples
from tests.serving.deployments import deployments, model

MS = 1_000_000
PATIENCE_S = 60.0


def rows(*given):
    return np.array([[*row, *[0] * (WIDTH - len(row))] for row in given], np.int64).reshape(-1, WIDTH)


# --- mailboxes ---


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5))
def test_a_mailbox_is_a_queue_of_bounded_length(steps, size):
    box, row, expected = np.zeros(cells_of_mailbox(size), np.int64), np.zeros(WIDTH, np.int64), deque()
    for number, is_sent in enumerate(steps):
        assert room_in(box) == size - len(expected)
        if is_sent and room_in(box) > 0:
            send(box, *range(number, number + WIDTH))
            expected.append(list(range(number, number + WIDTH)))
        elif not is_sent:
            assert receive(box, row) == bool(expected)
            if expected:
                assert row.tolist() == expected.popleft()


def test_a_full_mailbox_takes_no_more():
    box = np.zeros(cells_of_mailbox(2), np.int64)
    send(box, *range(WIDTH))
    send(box, *range(WIDTH))
    with pytest.raises(RuntimeError, match="A mailbox between two parts of the sharded scheduler is full"):
        send(box, *range(WIDTH))


@compiled
def _send_numbers(box, number, end):
    """Rows whose cells all follow from their number, as long as there is room."""
    while number < end and room_in(box) > 0:
        send(box, number, ~number, number * 3, number + 1, number ^ 255, -number, number, number * 7)
        number += 1
    return number


@compiled
def _check_numbers(box, number, row):
    """The next number that is expected; -1 if a row was not as it was sent."""
    while receive(box, row):
        is_right = row[0] == number and row[1] == ~number and row[2] == number * 3 and row[3] == number + 1
        if not (is_right and row[4] == number ^ 255 and row[5] == -number and row[7] == number * 7):
            return -1
        number += 1
    return number


@pytest.mark.parametrize(("size", "end"), [(1, 5_000), (61, 300_000), (4096, 5_000_000)])
def test_millions_of_rows_between_two_threads(size, end):
    """None is lost, torn, or out of order; both threads run without the GIL."""
    box, row = np.zeros(cells_of_mailbox(size), np.int64), np.zeros(WIDTH, np.int64)
    limit, sent = time.monotonic() + PATIENCE_S, []

    def write():
        number = 0
        while number < end and time.monotonic() < limit:
            number = _send_numbers(box, number, end)
            time.sleep(0)
        sent.append(number)

    _send_numbers(box, 0, 0)
    _check_numbers(box, 0, row)
    writer = threading.Thread(target=write)
    writer.start()
    number = 0
    while 0 <= number < end and time.monotonic() < limit:
        number = _check_numbers(box, number, row)
        time.sleep(0)
    writer.join(PATIENCE_S)
    assert (number, sent) == (end, [end])
    assert room_in(box) == size


def test_the_compiler_is_told_of_the_order():
    """A processor that keeps stores in order hides what the compiler may do without it."""
    box, row = np.zeros(cells_of_mailbox(2), np.int64), np.zeros(WIDTH, np.int64)
    for function, arguments in ((send.py_func, [box, *range(WIDTH)]), (receive.py_func, [box, row])):
        fresh = numba.njit(function)
        fresh(*arguments)
        (code,) = fresh.inspect_llvm().values()
        assert re.search(r"load atomic i64, .* acquire, align 8", code)
        assert re.search(r"store atomic i64 .* release, align 8", code)


# --- parts, one by one ---

TABLE = [0] + [2 * MS + MS // 10 * size for size in range(1, 33)]


def facts(models=3, devices=2, capacity=256, slo=20 * MS):
    latency = np.array([TABLE] * models)
    return {"latency": latency, "slo": np.full(models, slo), "num_devices": devices, "capacity": capacity}


def received(box):
    """All rows of a mailbox, without their moments."""
    found = np.zeros((100, WIDTH), np.int64)
    count = receive_rows(box, found, 0)
    found[:, 1] = 0
    return found[:count].tolist()


def test_a_shard_tells_its_newest_candidate_and_runs_what_it_is_granted():
    boxes = allocate_mailboxes(1, 2)
    shard = PolicyShard(facts(), 0, boxes)
    assert shard.turn(0, rows((ARRIVE, 0, 1, 7, 20 * MS), (ARRIVE, 0, 1, 8, 20 * MS))) == []
    # d - l(3), d - l(2), two requests, d
    assert received(boxes[0, 0]) == [[CANDIDATE, 0, 1, 20 * MS - TABLE[3], 20 * MS - TABLE[2], 2, 20 * MS, 0]]
    send(boxes[1, 0], GRANT, 0, 1, 1, 1000, 1000, 2, 1000)
    ((decisions, chosen),) = shard.turn(5 * MS, rows())
    assert decisions.tolist() == [[RUN, 1, 1, 0, 2, 5 * MS]]
    assert chosen.tolist() == [7, 8]
    assert received(boxes[0, 0]) == [
        [TAKEN, 0, 1, 1, 5 * MS, 5 * MS + TABLE[2], 0, 0],
        [CANDIDATE, 0, 1, 0, 0, 0, 0, 0],
    ]


def test_a_shard_gives_back_what_is_useless():
    """Nothing waits, or what waits would be late on a device that is this slow."""
    boxes = allocate_mailboxes(1, 2)
    shard = PolicyShard(facts(), 0, boxes)
    send(boxes[1, 0], GRANT, 0, 0, 1, 1000, 1000, 2, 1000)
    assert shard.turn(MS, rows()) == []
    assert received(boxes[0, 0])[0][:4] == [UNUSED, 0, 0, 1]
    shard.turn(MS, rows((ARRIVE, MS, 2, 5, 21 * MS)))
    send(boxes[1, 0], GRANT, 0, 2, 0, 20_000, 1000, 2, 1000)
    assert shard.turn(MS, rows()) == []
    assert [row[:4] for row in received(boxes[0, 0])] == [
        [CANDIDATE, 0, 2, 21 * MS - TABLE[2]],
        [UNUSED, 0, 2, 0],
        [CANDIDATE, 0, 2, 21 * MS - TABLE[2]],
    ]


def test_a_shard_drops_what_waits_for_no_faster_device():
    boxes = allocate_mailboxes(1, 2)
    shard = PolicyShard(facts(), 0, boxes)
    shard.turn(MS, rows((ARRIVE, MS, 2, 5, 21 * MS)))
    received(boxes[0, 0])
    send(boxes[1, 0], GRANT, 0, 2, 0, 20_000, 20_000, 2, 20_000)
    ((decisions, chosen),) = shard.turn(MS, rows())
    assert (decisions[0, 0], chosen.tolist()) == (DROP, [5])
    assert [row[0] for row in received(boxes[0, 0])] == [UNUSED, CANDIDATE]


def test_a_shard_drops_what_can_only_be_late_and_says_so():
    boxes = allocate_mailboxes(1, 2)
    shard = PolicyShard(facts(), 0, boxes)
    shard.turn(0, rows((ARRIVE, 0, 0, 3, 20 * MS)))
    received(boxes[0, 0])
    ((decisions, chosen),) = shard.turn(19 * MS, rows())
    assert (decisions[0, 0], chosen.tolist()) == (DROP, [3])
    assert received(boxes[0, 0]) == [[CANDIDATE, 0, 0, 0, 0, 0, 0, 1]]


def test_a_full_mailbox_keeps_room_for_answers_and_forgets_no_candidate():
    boxes = allocate_mailboxes(1, 2, num_candidates=3)
    shard = PolicyShard(facts(models=9), 0, boxes)
    shard.turn(0, rows(*((ARRIVE, 0, queue, queue, 20 * MS + queue) for queue in range(9))))
    assert room_in(boxes[0, 0]) == 2
    found = []
    for _ in range(3):
        found += received(boxes[0, 0])
        shard.turn(0, rows())
    assert [row[2] for row in found] == list(range(9))


def test_the_rank_grants_the_window_that_ends_first_and_listens_after_the_answer():
    boxes = allocate_mailboxes(2, 1)
    rank = Rank(facts(models=4, devices=1), boxes)
    send(boxes[0, 0], CANDIDATE, 0, 1, 0, 9 * MS, 1, 15 * MS, 0)
    rank.turn(0)
    # Queue 1 of shard 0 is the third of all.
    assert received(boxes[1, 0]) == [[GRANT, 0, 1, 0, 1000, 1000, 1, 1000]]
    send(boxes[0, 0], CANDIDATE, 0, 1, 0, 1, 1, 15 * MS, 0)
    send(boxes[0, 0], CANDIDATE, 0, 0, 0, 8 * MS, 1, 15 * MS, 0)
    send(boxes[0, 1], CANDIDATE, 0, 1, 0, 7 * MS, 1, 15 * MS, 0)
    rank.turn(0)
    assert received(boxes[1, 0]) + received(boxes[1, 1]) == []
    send(boxes[0, 0], TAKEN, 0, 1, 0, 0, 2 * MS, 0, 0)
    rank.turn(MS)
    assert received(boxes[1, 0]) + received(boxes[1, 1]) == []
    rank.turn(2 * MS)
    assert received(boxes[1, 0]) == []
    assert received(boxes[1, 1])[0][:4] == [GRANT, 0, 1, 0]
    send(boxes[0, 1], UNUSED, 0, 1, 0, 0, 0, 0, 0)
    rank.turn(2 * MS)
    assert received(boxes[1, 0])[0][:4] == [GRANT, 0, 0, 0]


def test_the_rank_waits_for_windows_and_takes_candidates_back():
    boxes = allocate_mailboxes(1, 2)
    rank = Rank(facts(), boxes)
    send(boxes[0, 0], CANDIDATE, 0, 0, 3 * MS, 4 * MS, 1, 9 * MS, 0)
    send(boxes[0, 0], CANDIDATE, 0, 1, 5 * MS, 6 * MS, 1, 9 * MS, 0)
    rank.turn(0)
    assert received(boxes[1, 0]) == []
    rank.turn(3 * MS)
    assert received(boxes[1, 0])[0][:4] == [GRANT, 0, 0, 0]
    send(boxes[0, 0], CANDIDATE, 0, 1, 0, 0, 0, 0, 0)
    rank.turn(4 * MS)
    rank.turn(10 * MS)
    assert received(boxes[1, 0]) == []
    assert rank.pool[NUM_IDLE] == 1


# --- parts, apart ---


SHARDS, EACH, SLO = 2, 6000, 100 * MS
APART = facts(models=5, devices=4, capacity=8192, slo=SLO)


class Parts:
    """Two shards and a rank, each in a thread until all requests have their fates, and what they took and decided."""

    def __init__(self):
        self.boxes = new_boxes()
        self.logs = [[] for _ in range(SHARDS)]
        self.rank_log, self.decided, self.failed = [], [[] for _ in range(SHARDS)], []
        self.shards = [PolicyShard(APART, number, self.boxes, log=self.logs[number]) for number in range(SHARDS)]
        self.rank, self.done = Rank(APART, self.boxes, log=self.rank_log), threading.Event()
        threads = [threading.Thread(target=self.guard, args=(self.run_shard, number)) for number in range(SHARDS)]
        last = threading.Thread(target=self.guard, args=(self.run_rank,))
        for thread in (*threads, last):
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE_S)
        self.done.set()
        last.join(PATIENCE_S)

    def guard(self, function, *arguments):
        try:
            function(*arguments)
        except BaseException as error:
            self.failed.append(error)

    def run_shard(self, number):
        draw, request, ended = np.random.default_rng(number), 0, 0
        own, limit = len(range(number, len(APART["latency"]), SHARDS)), time.monotonic() + PATIENCE_S
        while ended < EACH and time.monotonic() < limit:
            now = time.monotonic_ns()
            count = min(int(draw.integers(0, 40)), EACH - request)
            come = [
                (ARRIVE, now, int(draw.integers(own)), one, now + int(draw.integers(SLO // 4, SLO)))
                for one in range(request, request + count)
            ]
            request += count
            taken = self.shards[number].turn(now, rows(*come))
            self.decided[number] += taken
            ended += sum(len(chosen) for _, chosen in taken)
            time.sleep(2e-4)

    def run_rank(self):
        while not self.done.is_set():
            if self.rank.turn(time.monotonic_ns()) == 0:
                time.sleep(1e-4)


def new_boxes():
    return allocate_mailboxes(SHARDS, APART["num_devices"], num_candidates=8)


@pytest.fixture(scope="module")
def apart():
    return Parts()


def test_parts_in_threads_decide_soundly(apart):
    """Each request has one fate, no device has two batches at once, and no batch is late."""
    assert not apart.failed
    batches = []
    for log, decided in zip(apart.logs, apart.decided, strict=True):
        deadline = {row[3]: row[4] for part in log for row in part.tolist() if row[0] == ARRIVE}
        assert Counter(one for _, chosen in decided for one in chosen.tolist()) == Counter(range(EACH))
        for decisions, chosen in decided:
            for _, target, _, first, count, begin in decisions[decisions[:, 0] == RUN].tolist():
                end = begin + TABLE[count]
                batches.append((target, begin, end))
                assert min(deadline[one] for one in chosen[first : first + count].tolist()) >= end
    assert {target for target, _, _ in batches} == set(range(APART["num_devices"]))
    for (one, _, end), (other, begin, _) in itertools.pairwise(sorted(batches)):
        assert one != other or end <= begin


def test_parts_decide_the_same_by_the_rows_that_they_took(apart):
    boxes, granted = new_boxes(), [[] for _ in range(SHARDS)]
    rank = Rank(APART, boxes)
    for part in apart.rank_log:
        rank.take(part)
        for number in range(SHARDS):
            granted[number] += received(boxes[1, number])
    assert np.array_equal(rank.pool, apart.rank.pool)
    for number in range(SHARDS):
        shard, decided = PolicyShard(APART, number, boxes), []
        for part in apart.logs[number]:
            for row in part:
                decided += shard.take(row[None])
                received(boxes[0, number])
        for place in (0, 1):
            assert joined(decided, place) == joined(apart.decided[number], place)
        # All that the rank granted, but what came after the last turn.
        grants = [[GRANT, 0, *row[2:]] for part in apart.logs[number] for row in part.tolist() if row[0] == GRANT]
        assert granted[number][: len(grants)] == grants


def joined(taken, place):
    """Decisions, less where their requests stand among those of one call, or requests."""
    found = np.concatenate([part[place] for part in taken])
    if place == 0:
        found[:, 3] = 0
    return found.tolist()


# --- as a policy ---


def outcome(deployment, name, seconds):
    result = simulate_deployment(deployment, load_policy(name), seconds)
    return [(one.num_in_time, one.num_late, one.num_batches, one.dropped) for one in result.models]


# Batches end at the very moment at which the first of the ready queues can only be late.
TIED = Deployment(
    models=(
        model("a", slo=0.005058527375271792, alpha=0.002529263687635896, beta=0, largest=1, rate=974, shape=0.1),
        model("b", slo=0.00390625, alpha=0.001953125, beta=0, largest=1, rate=15, copies=2),
    ),
    devices=2,
)


@given(deployment=deployments(troubled=False), shards=st.integers(1, 7))
@example(deployment=TIED, shards=1)
@settings(max_examples=examples(100))
@pytest.mark.long
def test_without_troubles_shards_decide_what_one_pool_does(deployment, shards):
    assert outcome(deployment, f"sharded:shards={shards}", 2.0) == outcome(deployment, "symphony", 2.0)


REGIMES = {
    "too few devices": Deployment(models=(model("a", slo=0.03, rate=2500, copies=3),), devices=8),
    "bursts": Deployment(models=(model("a", slo=0.08, rate=900, shape=0.1, copies=4),), devices=6),
    "overload": Deployment(models=(model("a", rate=4000), model("b", slo=0.02, rate=1500)), devices=4),
    "many models": Deployment(models=(model("a", slo=0.1, rate=40, copies=60),), devices=12),
    "jitter": Deployment(models=(model("a", rate=1500, copies=3),), devices=8, jitter=0.2, slack=0.005),
    "outage and straggler": Deployment(
        models=(model("a", rate=1500, copies=3),),
        devices=8,
        troubles=(Outage(device=0, since=1.0, until=3.0), Straggler(device=1, factor=2.0)),
    ),
}


@pytest.mark.parametrize("name", REGIMES)
@pytest.mark.long
def test_as_much_is_served_in_time_as_by_one_pool(name):
    """Shards hear of slow devices, and of how many there are, only with grants: that is all that differs."""
    deployment = REGIMES[name]
    shares = [
        simulate_deployment(deployment, load_policy(policy), 10.0).in_time_share
        for policy in ("symphony", *(f"sharded:shards={shards}" for shards in (1, 2, 3)))
    ]
    is_exact = not deployment.jitter and not deployment.troubles
    assert shares == pytest.approx([shares[0]] * 4, abs=0 if is_exact else 0.01)


def test_a_scheduler_needs_a_shard():
    with pytest.raises(ServingError, match="at least one shard; given shards=0"):
        simulate_deployment(REGIMES["bursts"], Sharded(shards=0), 0.1)
