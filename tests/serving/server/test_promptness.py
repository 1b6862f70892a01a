"""Slices of processes, as the kernel tells them."""

import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.serving.server import promptness

TOLD = """
from meshwright.serving.server.promptness import ask_for_short_turns
print(ask_for_short_turns())
with open("/proc/self/sched") as file:
    print(*[line.split()[-1] for line in file if line.startswith("se.slice")])
"""


@pytest.mark.skipif(not Path("/proc/self/sched").exists(), reason="the kernel does not tell slices")
def test_the_kernel_gives_a_short_slice_or_leaves_it():
    before = Path("/proc/self/sched").read_text()
    ran = subprocess.run([sys.executable, "-c", TOLD], check=True, capture_output=True, text=True, timeout=60)
    taken, *slices = ran.stdout.split()
    if taken == "True" and slices and "se.slice" in before:
        assert int(slices[0]) == 100_000


def test_where_it_cannot_be_asked_for_nothing_happens(monkeypatch):
    monkeypatch.setattr(promptness.platform, "machine", lambda: "another")
    assert not promptness.ask_for_short_turns()
