"""Starts the ranks of a distributed test, with a time limit, and reaps them whatever happens."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from tests.warm import programs

T = TypeVar("T")

ROOT = Path(__file__).parent.parent


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def peak_rss_bytes() -> int:
    """Return the largest resident memory of this process in bytes.

    Not ``ru_maxrss``: a process that is started from a larger one begins with the size of its parent.
    """
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def run_ranks(module: str, world_size: int, *arguments: str, timeout_s: float = 300) -> None:
    """Run ``python -m module world_size arguments``, which calls `fork_ranks`; fails with what was printed.

    The module is run in a fork of a process that has loaded torch (`tests.warm`).
    """
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [programs() / "python", "-m", module, str(world_size), *arguments],
            env=environment,
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        code: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout_s)
        finally:
            process.kill()  # the ranks end with it
            process.wait(timeout=30)
        output.seek(0)
        assert code == 0, f"{module} ended with {code}:\n{output.read()[-8000:]}"


def fork_prepared(world_size: int, prepare: Callable[[], T], run: Callable[[T], None]) -> None:
    """`fork_ranks` with what ``prepare`` makes: once before the forks, or in each of them.

    Builds of torch for CUDA refuse a backward in a fork of a process that has run one, as every capture does.
    """
    import torch  # who only starts ranks loads none

    if torch.version.cuda is None:
        made = prepare()
        fork_ranks(world_size, lambda: run(made))
    else:
        fork_ranks(world_size, lambda: run(prepare()))


def fork_ranks(world_size: int, run: Callable[[], None]) -> None:
    """Run a function in a fork of this process per rank: all have what was made before. Exits as soon as one fails."""
    ranks = [_fork_rank(rank, run) for rank in range(world_size)]
    for _ in ranks:
        _, status = os.wait()
        if status != 0:
            sys.exit(1)


def _fork_rank(rank: int, run: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        code = 1
        try:
            run()
            code = 0
        except BaseException:
            print(f"rank {rank}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    return child
