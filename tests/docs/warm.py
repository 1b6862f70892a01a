"""Commands of the pages in forks of one process that has loaded everything already: pages have a hundred commands, and
most of what they take is the loading of torch and numba.

`programs` are what a page finds as ``meshwright`` and ``python``: clients that hand their arguments, folder,
environment and standard streams to the server, which forks; the fork is the command from there on. What is no program
file (``python -m``, ``python -c``) goes to Python itself.

    client  ── socket: JSON and file descriptors ──▶  server ── fork ──▶ command ── exit code ──▶ client
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType

from meshwright.cli.main import run

# Small, without the site's packages: it starts in milliseconds.
_CLIENT = """#!{python} -IS
import json, os, socket, sys
program, words = {program!r}, sys.argv[1:]
if program == "python" and not (words and words[0].endswith(".py")):
    os.execv({python!r}, [{python!r}, *words])
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    request = json.dumps([program, words, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [len(request).to_bytes(8, "little")], [0, 1, 2])
    server.sendall(request)
    answer = server.recv(1)
sys.exit(answer[0] if answer else "the command was killed")
"""
# What commands load; all of it together takes the server some seconds, once.
_LOADED = (
    "torch._dynamo",
    "torch.export",
    "meshwright.capture",
    "meshwright.measurement",
    "meshwright.planner",
    "meshwright.report",
    "meshwright.training",
    "meshwright.validation.validate",
)


def programs() -> dict[str, str]:
    """The text of each program that is a client of this process's server, which is started when first asked for."""
    address = _server()
    return {
        name: _CLIENT.format(python=sys.executable, program=name, address=address) for name in ("meshwright", "python")
    }


@cache
def _server() -> str:
    folder = tempfile.TemporaryDirectory(prefix="warm")
    address = str(Path(folder.name) / "socket")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.docs.warm", address],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    atexit.register(_stop, process, folder)
    if process.stdout is None or process.stdout.readline() != b"ready\n":
        raise RuntimeError("the server of the pages' commands did not start; its output stands above")
    return address


def _stop(process: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str]) -> None:
    process.communicate()  # the end of its input is its sign to end
    folder.cleanup()


def serve(address: str) -> None:
    """Answer clients until the input ends."""
    for name in _LOADED:
        __import__(name)
    gc.freeze()  # what was loaded stays shared by the forks
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        print("ready", flush=True)
        while sys.stdin not in select.select([server, sys.stdin], [], [])[0]:
            client, _ = server.accept()
            if os.fork() == 0:
                server.close()
                _become(client)
            client.close()
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _become(client: socket.socket) -> None:
    """Run the command that a client asks for; never returns."""
    code = 1
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Processes that the command spawns load its main module again, which is not this one.
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        head, streams, _, _ = socket.recv_fds(client, 8, 3)
        with client.makefile("rb") as sent:
            program, words, folder, environment = json.loads(sent.read(int.from_bytes(head, "little")))
        for place, stream in enumerate(streams):
            os.dup2(stream, place)
            os.close(stream)
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        code = _run_program(program, words)
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else int(done.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            atexit._run_exitfuncs()
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        client.sendall(bytes([code & 255]))
        os._exit(code)


def _run_program(program: str, words: list[str]) -> int:
    if program == "python":
        sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")
        return 0
    sys.argv, sys.path[0] = ["meshwright", *words], str(Path.cwd())
    run()
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(sys.argv[1])
