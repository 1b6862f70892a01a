"""Commands of the pages, and ranks of runs, in forks of one process that has loaded everything already: there are
hundreds, and most of what they take is the loading of torch and numba.

`write_programs` writes what a page finds as ``meshwright`` and ``python``: clients that hand their arguments, folder,
environment and standard streams to the server, which forks; the fork is the command from there on, and ends when its
client does. Forks take ``python`` for their interpreter, so that the ranks that they start are forks, too, be it by
torchrun's agent or by multiprocessing. What is neither of these nor a program file goes to Python itself.

    client  ── socket: JSON and file descriptors ──▶  server ── fork ──▶ command ── exit code ──▶ client
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import io
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from contextlib import chdir, redirect_stdout, suppress
from functools import cache
from pathlib import Path
from types import ModuleType

from meshwright.capture import capture_model
from meshwright.cli.main import invoke, run
from meshwright.zoo import load_model

_PYTHON = sys.executable
# Modules that are run by `python -m` and need nothing but what is loaded.
_MODULES = ("meshwright", "meshwright.training", "torch.distributed.run")
# Small, without the site's packages: it starts in milliseconds.
_CLIENT = """#!{python} -IS
import json, os, socket, sys
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
    if not words or not (words[0].endswith(".py") or words[0] == "-m" and words[1] in {modules!r}):
        os.execv({python!r}, [{python!r}, *sys.argv[1:]])
interpreter = os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "python")
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    request = json.dumps([streams, program, words, interpreter, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [len(request).to_bytes(8, "little")], streams)
    server.sendall(request)
    answer = server.recv(1)
sys.exit(answer[0] if answer else "the command was killed")
"""
# What commands load; all of it together takes the server some seconds, once.
_LOADED = (
    "torch._dynamo",
    "torch.export",
    "meshwright.measurement",
    "meshwright.planner",
    "meshwright.report",
    "meshwright.training",
    "meshwright.validation.validate",
)


def write_programs(folder: Path, **more: str) -> None:
    """Write clients of this process's server, which is started when first asked for, and more programs by name."""
    address = _server()
    clients = {
        name: _CLIENT.format(python=_PYTHON, program=name, modules=_MODULES, address=address)
        for name in ("meshwright", "python")
    }
    for name, text in {**clients, **more}.items():
        path = folder / name
        path.write_text(text)
        path.chmod(0o755)


@cache
def _server() -> str:
    folder = tempfile.TemporaryDirectory(prefix="warm")
    address = str(Path(folder.name) / "socket")
    process = subprocess.Popen(
        [_PYTHON, "-m", "tests.warm", address],
        cwd=Path(__file__).parents[1],
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
    _warm_up()
    gc.freeze()  # what was loaded stays shared by the forks
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        print("ready", flush=True)
        while sys.stdin not in select.select([server, sys.stdin], [], [])[0]:
            client, _ = server.accept()
            if os.fork() == 0:
                server.close()
                _attend(client)
            client.close()
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _warm_up() -> None:
    """Capture and plan once: both load more when they are first called, and machine code last of all."""
    source = load_model("gpt-tiny", fake=True)
    capture_model(source.model, source.inputs, targets=source.targets, loss=source.loss, verify=False)
    plan = ["plan", "gpt-tiny", "--cluster", "2xcpu", "--batch", "8", "--stages", "2", "--json"]
    with redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as folder, chdir(folder):
        if invoke(plan) != 0:
            raise RuntimeError(f"what the server plans to load everything failed: {plan}")


def _attend(client: socket.socket) -> None:
    """Fork the command that a client asks for, end it when the client is killed, and answer with its exit code."""
    head, streams, _, _ = socket.recv_fds(client, 8, 64)
    with client.makefile("rb") as sent:
        request = json.loads(sent.read(int.from_bytes(head, "little")))
    command = os.fork()
    if command == 0:
        client.close()
        _become(streams, *request)
    for stream in streams:
        os.close(stream)
    threading.Thread(target=_end_with, args=(client, command), daemon=True).start()
    _, status = os.waitpid(command, 0)
    if (code := os.waitstatus_to_exitcode(status)) >= 0:
        with suppress(BrokenPipeError):
            client.sendall(bytes([code]))
    os._exit(0)


def _end_with(client: socket.socket, command: int) -> None:
    """Nothing follows a request but the end of the client."""
    client.recv(1)
    with suppress(ProcessLookupError):
        os.kill(command, signal.SIGKILL)


def _become(
    streams: list[int],
    places: list[int],
    program: str,
    words: list[str],
    python: str,
    folder: str,
    environment: dict[str, str],
) -> None:
    """Run a command in the place of this process; never returns."""
    code = 1
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Processes that the command spawns load its main module again, which is not this one.
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        for place, stream in zip(places, [fcntl.fcntl(stream, fcntl.F_DUPFD, 100) for stream in streams], strict=True):
            os.dup2(stream, place)
            os.close(stream)
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        sys.executable = python
        multiprocessing.set_executable(python)
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
        os._exit(code & 255)


def _run_program(program: str, words: list[str]) -> int:
    if program == "spawned":
        sys.argv = words[-2:]
        exec(words[-2])  # ...; spawn_main(tracker_fd=5, pipe_handle=7)
    elif program == "python" and words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], str(Path.cwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif program == "python":
        sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")
    else:
        sys.argv, sys.path[0] = ["meshwright", *words], str(Path.cwd())
        run()
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(sys.argv[1])
