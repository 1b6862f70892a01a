"""Ranks that end well, fail, die or hang: what the caller learns, and that none is left."""

import multiprocessing
import os
import signal

import pytest
import torch
import torch.distributed as dist

from meshwright.measurement import run_ranks
from meshwright.spec import MeasurementError
from tests.events import SeenEvents

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("warm_ranks")]
LIMIT_S = 60.0


def _sum_ranks(context, offset):
    total = torch.tensor(context.rank + offset)
    dist.all_reduce(total)
    context.events.progress("sum", context.rank + 1, context.num_ranks)
    context.events.metric("rank", context.rank, 0)
    return int(total), torch.get_num_threads(), sorted(os.sched_getaffinity(0))


def _die(context):
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _fail(context):
    raise ValueError("the third wheel is missing")


def _hang(context):
    signal.pause()


@pytest.fixture(autouse=True)
def _nobody_is_left():
    yield
    assert multiprocessing.active_children() == []


def test_results_come_by_rank_and_events_from_rank_0():
    events = SeenEvents()
    results = run_ranks(_sum_ranks, 10, num_ranks=2, timeout_s=LIMIT_S, events=events)
    cores = sorted(os.sched_getaffinity(0))
    assert results == [(21, 1, [cores[rank % len(cores)]]) for rank in range(2)]
    assert events.seen == [("sum", 1, 2), ("rank", 0, 0)]


def test_a_killed_rank_ends_the_run_and_is_named():
    with pytest.raises(MeasurementError, match=r"Rank 1 .* was killed by signal 9"):
        run_ranks(_die, num_ranks=2, timeout_s=LIMIT_S)


def test_a_failing_rank_shows_its_own_error_and_line():
    with pytest.raises(MeasurementError, match=r"Rank 0 .* ValueError: the third wheel is missing \(test_processes"):
        run_ranks(_fail, num_ranks=1, timeout_s=LIMIT_S)


def test_a_rank_that_hangs_is_ended_when_the_time_is_up():
    with pytest.raises(MeasurementError, match=r"did not end within 0\.5 s \(no result from rank 0\)"):
        run_ranks(_hang, num_ranks=1, timeout_s=0.5)
