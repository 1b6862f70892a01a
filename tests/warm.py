"""Commands of the pages, and ranks, run as forks of one process that has loaded everything: `tests.warm_server`.

There are hundreds of them, and most of what they take is the loading of torch and numba. `write_programs` writes what a
page finds as ``meshwright`` and ``python``: clients that hand their arguments, folder, environment and standard streams
to the server, and signals too; they end as the command ends. What is neither a module of ours or torch's, a program
file, nor a process that multiprocessing spawns goes to Python itself.

All processes that share the tests ask one server, which the process that shares them out starts (`tests.conftest`).
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

# Where the server of all test processes is reached.
ADDRESS = "MESHWRIGHT_TESTS_WARM"
# On a fresh clone and a busy machine the server has all of torch and of our loops to compile first.
_START_S = 900.0
_PYTHON = sys.executable
# Modules that are run by `python -m` and need nothing but what is loaded; and those of the tests.
_MODULES = ("meshwright", "meshwright.training", "torch.distributed.run")
# Small, without the site's packages: it starts in milliseconds.
_CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
def is_open(place):
    try:
        return bool(os.fstat(place))
    except OSError:
        return False
program, words, streams = {program!r}, sys.argv[1:], [0, 1, 2]
if words[-1:] == ["--multiprocessing-fork"]:
    program, streams = "spawned", [place for place in range(64) if is_open(place)]
elif program == "python":
    words = words[words[:1] == ["-u"]:]
    first, module = (*words, "", "")[:2]
    is_loaded = module in {modules!r} or module.startswith("tests.")
    if not (first.endswith(".py") or first == "-m" and is_loaded):
        os.execv({python!r}, [{python!r}, *sys.argv[1:]])
interpreter = os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "python")
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    request = json.dumps([streams, program, words, interpreter, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [len(request).to_bytes(8, "little")], streams)
    server.sendall(request)
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: server.send(bytes([number]), socket.MSG_NOSIGNAL))
    answer = server.recv(2)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
if len(answer) < 2:
    sys.exit("the server of commands has ended")
if answer[0]:  # the command was killed by this signal
    if answer[0] != signal.SIGKILL:
        signal.signal(answer[0], signal.SIG_DFL)
    os.kill(os.getpid(), answer[0])
sys.exit(answer[1])
"""


def write_programs(folder: Path, **more: str) -> None:
    """Write clients of the server, and more programs by name."""
    address = os.environ.get(ADDRESS) or _own_server()
    wait_for_server(address)
    clients = {
        name: _CLIENT.format(python=_PYTHON, program=name, modules=_MODULES, address=address)
        for name in ("meshwright", "python")
    }
    for name, text in {**clients, **more}.items():
        path = folder / name
        path.write_text(text)
        path.chmod(0o755)


@cache
def programs() -> Path:
    """A folder with ``meshwright`` and ``python`` for all that this process starts."""
    folder = tempfile.TemporaryDirectory(prefix="programs")
    atexit.register(folder.cleanup)
    write_programs(Path(folder.name))
    return Path(folder.name)


@cache
def _own_server() -> str:
    return start_server()


def start_server() -> str:
    """Start the server, which ends with this process; its address, which is there once it answers."""
    folder = tempfile.TemporaryDirectory(prefix="warm")
    address = str(Path(folder.name) / "socket")
    process = subprocess.Popen(
        [_PYTHON, "-m", "tests.warm_server", address],
        cwd=Path(__file__).parents[1],
        # Forks compute on CPUs: a process that has met a GPU cannot be forked.
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.PIPE,
    )
    atexit.register(_stop, process, folder)
    return address


def wait_for_server(address: str) -> None:
    """Return once the server answers; RuntimeError with its own error if it has failed."""
    end, failed = time.monotonic() + _START_S, Path(address).with_suffix(".failed")
    while not Path(address).exists():
        if failed.exists():
            raise RuntimeError(f"the server of the tests' commands has failed:\n{failed.read_text()}")
        if time.monotonic() > end:
            raise RuntimeError(f"the server of the tests' commands did not start in {_START_S:g} s")
        time.sleep(0.02)


def _stop(process: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str]) -> None:
    process.communicate()  # the end of its input is its sign to end
    folder.cleanup()
