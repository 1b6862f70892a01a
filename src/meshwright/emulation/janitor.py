"""Remove a lab's cgroups when its launcher ends, however it ends: ``python janitor.py FOLDER`` reads until end of file.

The launcher holds the other end of standard input. When it closes, or the launcher is killed, every process in the
folder's cgroups is killed and the folders are removed. Network namespaces need no such help (`namespaces`). It imports
the standard library only, so that it starts at once and stays small.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

PREFIX = "meshwright-lab-"
_GIVE_UP_S = 20.0


def remove_groups(folder: Path) -> None:
    """Kill the processes of all cgroups below a folder, and remove the folders. Does nothing if it is gone."""
    end = time.monotonic() + _GIVE_UP_S
    while folder.exists() and time.monotonic() < end:
        groups = [path for path in folder.glob("rank*") if path.is_dir()]
        for group in (*groups, folder):
            with contextlib.suppress(OSError):
                for line in (group / "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(line), signal.SIGKILL)
        for group in (*groups, folder):
            with contextlib.suppress(OSError):
                group.rmdir()  # refused until its last process is gone
        if folder.exists():
            time.sleep(0.02)


def main(folder: str) -> None:
    """Wait for the end of standard input, then remove the folder's groups."""
    # In a session of its own it gets no Ctrl-C; a terminal that closes or a batch system may still send these.
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    while os.read(sys.stdin.fileno(), 4096):
        pass
    remove_groups(Path(folder))


if __name__ == "__main__":
    main(sys.argv[1])
