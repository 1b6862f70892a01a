"""Which batch a worker had begun is known after it was killed, and of others nothing is taken to be harmless."""

import os
import signal
import subprocess
import sys

import pytest

from meshwright.serving.server.begun import Begun, clear_begun, take_begun
from meshwright.serving.server.worker import Worker

WORKER = """
import sys, time
from pathlib import Path
from meshwright.serving.server.begun import Begun
import os
begun = Begun(Path(sys.argv[1]), os.getpid())
for number in sys.argv[2:]:
    begun.note(int(number))
print("noted", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("noted", "begun"), [([], -1), ([6], 6), ([6, 7], 7)])
def test_it_is_known_of_a_worker_that_was_killed(tmp_path, noted, begun):
    command = [sys.executable, "-c", WORKER, str(tmp_path), *map(str, noted)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        try:
            assert worker.stdout.readline() == "noted\n"
        finally:
            worker.send_signal(signal.SIGKILL)
            worker.wait(20)
    assert take_begun(tmp_path, worker.pid) == begun
    assert not list(tmp_path.iterdir())


def test_a_worker_forgets_the_numbers_of_another_scheduler(tmp_path):
    worker = Worker(tmp_path, 0, [], None)
    worker._begun.note(3)
    worker._hear({"epoch": 5})
    assert take_begun(tmp_path, os.getpid()) == -1


def test_only_workers_that_live_are_remembered(tmp_path):
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait(20)
    for pid in (os.getpid(), ended.pid):
        Begun(tmp_path, pid).note(3)
    (tmp_path / "begun-what").touch()
    clear_begun(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"begun-{os.getpid()}", "begun-what"}


def test_numbers_of_another_scheduler_are_forgotten(tmp_path):
    begun = Begun(tmp_path, os.getpid())
    begun.note(3)
    begun.note()
    assert take_begun(tmp_path, os.getpid()) == -1


@pytest.mark.parametrize("content", [None, b"", b"\0\0\0", bytes(12)])
def test_what_cannot_be_known_is_not_made_up(tmp_path, content):
    if content is not None:
        (tmp_path / "begun-7").write_bytes(content)
    assert take_begun(tmp_path, 7) is None
    assert not list(tmp_path.iterdir())
