"""Who loses two workers is at fault; who was only sent to them is not, and suspects are computed alone."""

import socket

import numpy as np
import pytest

from meshwright.serving.server.begun import Begun
from meshwright.serving.server.channel import MessageChannel
from meshwright.serving.server.peers import SLOT_BITS, WorkerBatch, WorkerPeer
from meshwright.serving.server.suspects import Suspects

FRONT, OTHER = 1 << SLOT_BITS, 2 << SLOT_BITS


@pytest.fixture
def lost(tmp_path):
    """A worker that has gone with these batches, of which it had begun one."""
    sides = []

    def lose(*batches, begun, pid=1):
        here, there = socket.socketpair()
        sides.extend([here, there])
        worker = WorkerPeer(MessageChannel(here), device=0, pid=pid)
        for number, requests in enumerate(batches):
            worker.give(WorkerBatch(number, 7, np.array(requests, np.int64), len(requests), 1, True), 0)
        if begun is not None:
            Begun(tmp_path, pid).note(begun)
        return worker

    yield lose
    for side in sides:
        side.close()


def judged(suspects, worker, is_awaited=lambda _: True):
    return [(model, guilty.tolist(), again.tolist()) for model, guilty, again in suspects.judge(worker, is_awaited)]


@pytest.mark.parametrize("begun", [0, None])
def test_who_loses_two_workers_is_at_fault(tmp_path, lost, begun):
    suspects = Suspects(tmp_path)
    assert judged(suspects, lost([FRONT, FRONT + 1], [FRONT + 2], begun=begun)) == [
        (7, [], [FRONT, FRONT + 1]),
        (7, [], [FRONT + 2]),
    ]
    assert judged(suspects, lost([FRONT + 1, FRONT + 2], begun=begun, pid=2)) == [(7, [FRONT + 1], [FRONT + 2])]


def test_what_was_not_begun_is_not_blamed(tmp_path, lost):
    suspects = Suspects(tmp_path)
    for pid in range(3):
        assert judged(suspects, lost([FRONT], begun=-1, pid=pid)) == [(7, [], [FRONT])]
    assert [part.tolist() for part in suspects.parts_of(np.array([FRONT, FRONT + 1]))] == [[FRONT, FRONT + 1]]


def test_it_may_have_done_more_than_was_heard_of(tmp_path, lost):
    suspects = Suspects(tmp_path)
    batches = [FRONT], [FRONT + 1, FRONT + 2], [FRONT + 3]
    assert [guilty for _, guilty, _ in judged(suspects, lost(*batches, begun=1))] == [[], [], []]
    assert [guilty for _, guilty, _ in judged(suspects, lost(*batches, begun=1, pid=2))] == [
        [],
        [FRONT + 1, FRONT + 2],
        [],
    ]


def test_what_nobody_waits_for_is_not_suspected(tmp_path, lost):
    suspects = Suspects(tmp_path)
    judged(suspects, lost([FRONT, OTHER], begun=0), lambda request: request == OTHER)
    assert [part.tolist() for part in suspects.parts_of(np.array([FRONT, OTHER]))] == [[FRONT], [OTHER]]


def test_an_idle_worker_leaves_nothing_behind(tmp_path, lost):
    assert judged(Suspects(tmp_path), lost(begun=5)) == []
    assert not list(tmp_path.iterdir())


def test_suspects_are_computed_one_by_one_after_the_others(tmp_path, lost):
    suspects = Suspects(tmp_path)
    judged(suspects, lost([FRONT, FRONT + 2, OTHER], begun=0))
    batch = np.array([FRONT, FRONT + 1, FRONT + 2, OTHER])
    assert [part.tolist() for part in suspects.parts_of(batch)] == [[FRONT + 1], [FRONT], [FRONT + 2], [OTHER]]
    assert [part.tolist() for part in suspects.parts_of(batch[[0, 2]])] == [[FRONT], [FRONT + 2]]
    suspects.clear(batch[:1])
    suspects.forget(2)
    assert [part.tolist() for part in suspects.parts_of(batch)] == [[FRONT, FRONT + 1, OTHER], [FRONT + 2]]
