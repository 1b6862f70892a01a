"""Backup workers that are stopped: every version takes the (n - b)-th smallest of n times, as the papers count."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.program.controllers import BackupWorkers, BoundedDelay, PartialReduce, StoppedBackups
from meshwright.spec import Opcode, OptimizerStep, ProgramError, Send, decode_document, encode_document
from meshwright.spec.control import Died, Ended, Started
from meshwright.spec.decision_log import DecisionLog
from tests.marks import examples
from tests.program.test_controllers import UNIT, contentions, ends, run, seeds, straggling


def updates_by_versions(num_workers, num_backups, num_versions, backwards, update, latency):
    """When each version was made; the server sends the parameters to one worker after the other."""
    now, sending, made = 0, 0, []
    for version in range(num_versions):
        arrivals, sending = [], max(sending, now)
        for worker in range(num_workers):
            sending += latency if version else 0
            arrivals.append(sending + backwards[version * num_workers + worker] + latency)
        now = sorted(arrivals)[num_workers - num_backups - 1] + update
        made.append(now)
    return made


@settings(max_examples=examples(40))
@given(
    seed=seeds,
    num_workers=st.integers(1, 8),
    data=st.data(),
    num_versions=st.integers(1, 12),
    update=st.sampled_from([0, 999_983]),
    latency=st.sampled_from([0, 12_347, 700_001]),
)
def test_versions_take_the_kth_smallest_time(seed, num_workers, data, num_versions, update, latency):
    num_backups = data.draw(st.integers(0, num_workers - 1))
    controller = StoppedBackups(num_workers=num_workers, num_backups=num_backups, num_versions=num_versions)
    backwards = straggling(num_workers * num_versions, seed)
    result, _ = run(controller, backwards, update=update, latency=latency)
    made = ends(result, Opcode.OPTIMIZER_STEP)[1]
    assert made == updates_by_versions(num_workers, num_backups, num_versions, backwards, update, latency)
    state, num_sent = result.state, int((result.timeline.opcode == Opcode.SEND_GRADIENT).sum())
    assert state.applied == (num_workers - num_backups) * num_versions
    assert state.applied + state.dropped == num_sent
    assert num_sent + state.abandoned == num_workers * num_versions


@pytest.mark.long
@settings(max_examples=20)
@given(seed=seeds, contention=contentions, num_backups=st.integers(0, 3))
def test_with_shared_links_what_was_applied_was_computed_on_its_version(seed, contention, num_backups):
    controller = StoppedBackups(num_workers=4, num_backups=num_backups, num_versions=5, num_bytes=1)
    result, body = run(controller, straggling(20, seed), latency=300_000, routes=[[0]], contention=contention)
    version_of = {int(body.microbatch[i]): int(body.version[i]) for i in np.flatnonzero(body.opcode == Opcode.BACKWARD)}
    for i in np.flatnonzero(body.opcode == Opcode.OPTIMIZER_STEP).tolist():
        awaited = body.waits_of(i)
        received = awaited[body.opcode[awaited] == Opcode.RECEIVE_GRADIENT]
        assert {version_of[int(body.microbatch[k])] for k in received} == {int(body.version[i])}
    assert result.state.applied == (4 - num_backups) * 5


def test_the_gains_are_those_of_the_notes():
    """16 workers, lognormal of 0.1, one in twenty three times as slow: 1.43 1.65 1.66 1.59 for 1 to 4 backups.

    The mean step without backups is 2.27 there. A version takes exactly the k-th smallest time (above), so gains follow
    from many draws of 16 times; a simulated run has those of its own draws.
    """
    random = np.random.default_rng(0)
    draws = random.lognormal(0, 0.1, (200_000, 16)) * np.where(random.random((200_000, 16)) < 0.05, 3, 1)
    means = np.sort(draws, axis=1).mean(axis=0)
    assert means[15] == pytest.approx(2.27, rel=0.02)
    gains = [(16 - backups) / 16 * means[15] / means[15 - backups] for backups in (1, 2, 3, 4)]
    assert gains == pytest.approx([1.43, 1.65, 1.66, 1.59], rel=0.02)
    backwards = straggling(16 * 40, 3)
    steps = np.sort(np.array(backwards).reshape(40, 16), axis=1)
    for backups in (0, 3):
        controller = StoppedBackups(num_workers=16, num_backups=backups, num_versions=40)
        assert ends(run(controller, backwards)[0], Opcode.OPTIMIZER_STEP)[1][-1] == int(steps[:, 15 - backups].sum())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("policy", "facts", "rate"),
    [
        *(
            (BoundedDelay, {"max_delay": delay}, rate)
            for delay, rate in ((1, 0.666), (2, 0.773), (4, 0.839), (8, 0.875))
        ),
        *((PartialReduce, {"group_size": size}, rate) for size, rate in ((2, 0.881), (4, 0.820), (8, 0.678))),
    ],
)
def test_updates_per_worker_and_time_are_those_of_the_notes(policy, facts, rate):
    """Until the first worker has done 1,200 iterations; the notes' own runs were shorter."""
    count = 1200
    counted = {"num_clocks": count} if policy is BoundedDelay else {"num_iterations": count}
    result = run(policy(num_workers=16, **facts, **counted), straggling(16 * count, 5))[0]
    microbatches, times = ends(result, Opcode.BACKWARD)
    until = min(time for microbatch, time in zip(microbatches, times, strict=True) if microbatch // 16 == count - 1)
    assert sum(time <= until for time in times) / 16 / until * UNIT == pytest.approx(rate, rel=0.02)


@pytest.mark.long
def test_a_worker_that_is_always_late_holds_all_up_but_for_groups():
    """One of 16 takes twice as long: a synchronous step waits for it, a bounded delay in the end too, groups do not."""
    count, random = 120, np.random.default_rng(1)
    draws = random.lognormal(0, 0.1, (count, 16)) * np.where(random.random((count, 16)) < 0.05, 3, 1)
    draws[:, 0] *= 2
    backwards = np.rint(draws * UNIT).astype(int).reshape(-1).tolist()

    def rate(controller):
        times = ends(run(controller, backwards)[0], Opcode.BACKWARD)[1]
        return len(times) / 16 / times[-1] * UNIT

    synchronous = rate(BackupWorkers(num_workers=16, num_backups=0, num_versions=count))
    assert synchronous == pytest.approx(1 / draws.max(axis=1).mean(), rel=1e-3)
    # The expectation, of many draws: 0.36, the notes say 0.368.
    assert synchronous == pytest.approx(0.368, rel=0.08)
    bounded = rate(BoundedDelay(num_workers=16, max_delay=4, num_clocks=count))
    assert bounded == pytest.approx(1 / draws[:, 0].mean(), rel=0.02)
    stopped = StoppedBackups(num_workers=16, num_backups=1, num_versions=count)
    assert run(stopped, backwards)[0].timeline.duration_s < 0.8 * count * draws.max(axis=1).mean() * UNIT / 1e12


def test_a_log_of_what_was_abandoned_is_written_and_read():
    controller = StoppedBackups(num_workers=4, num_backups=2, num_versions=3)
    log = run(controller, straggling(12, 0))[0].log
    assert len(log.abandoned) == 2 * 2 * 3
    data = json.loads(json.dumps(encode_document(log)))
    assert decode_document(DecisionLog, data, "log") == log


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"num_backups": 4}, r"num_backups is 4; .*, 0 to 3\."),
        ({"num_versions": 0}, r"num_versions is 0; .*, 1 or more\."),
    ],
)
def test_settings_that_cannot_be_are_refused(facts, message):
    with pytest.raises(ProgramError, match=message):
        StoppedBackups(**{"num_workers": 4, "num_backups": 1, "num_versions": 1, **facts})


def test_a_gradient_of_a_worker_that_died_counts_beside_those_of_the_living():
    """Without backups an update waits for all that live, also if a dead worker's gradient has arrived."""
    policy = StoppedBackups(num_workers=3, num_backups=0, num_versions=2)
    state, begun = policy.decide(policy.initial, Started(next_handle=0), 0)
    handle, updates = len(begun.issues), []

    def follow(event):
        nonlocal state, handle
        state, decision = policy.decide(state, event, 0)
        handle += len(decision.issues)
        updates.extend(issue for issue in decision.issues if isinstance(issue.instruction, OptimizerStep))

    def arrive(worker):
        send = Send(stage=0, microbatch=worker, peer=1, payload="gradient", num_bytes=0)
        follow(Ended(next_handle=handle, handle=0, rank=worker, instruction=send))

    arrive(2)
    arrive(0)
    follow(Died(next_handle=handle, rank=2))
    assert not updates
    arrive(1)
    (update,) = updates
    assert len(update.waits) == 3
