"""The process whose forks are commands of the pages and ranks: ``python -m tests.warm_server ADDRESS``.

    client (tests.warm)  ── socket: JSON and file descriptors ──▶  server ── fork ──▶ command ── exit code ──▶ client

The fork is the command from there on, and ends when its client does. Forks take ``python`` for their interpreter, so
that the ranks that they start are forks, too, be it by torchrun's agent or by multiprocessing.
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
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
from contextlib import chdir, redirect_stdout, suppress
from pathlib import Path
from types import ModuleType

from meshwright.capture import capture_model
from meshwright.cli.main import invoke, run
from meshwright.zoo import load_model

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


def serve(address: str) -> None:
    """Answer clients until the input ends."""
    for name in _LOADED:
        __import__(name)
    _warm_up()
    gc.freeze()  # what was loaded stays shared by the forks
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{address}.new")
        server.listen()
        Path(f"{address}.new").rename(address)
        while sys.stdin not in select.select([server, sys.stdin], [], [])[0]:
            client, _ = server.accept()
            if os.fork() == 0:
                try:
                    server.close()
                    _attend(client)
                finally:  # a client that has gone before it has asked
                    os._exit(1)
            client.close()
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _warm_up() -> None:
    """Capture and plan once: both load more when they are first called, and machine code last of all.

    For inference: builds of torch for CUDA refuse a backward in a fork once there was one before it.
    """
    source = load_model("gpt-tiny", fake=True)
    capture_model(source.model, source.inputs, mode="inference", verify=False)
    plan = ["plan", "gpt-tiny", "--cluster", "2xcpu", "--batch", "8", "--stages", "2", "--json"]
    with redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as folder, chdir(folder):
        if invoke(plan) != 0:
            raise RuntimeError(f"what the server plans to load everything failed: {plan}")


def _attend(client: socket.socket) -> None:
    """Fork the command that a client asks for, end it when the client is killed, and answer with its exit code."""
    head, streams, _, _ = socket.recv_fds(client, 8, 64)
    with client.makefile("rb") as sent:
        request = json.loads(sent.read(int.from_bytes(head, "little")))
    is_test = request[2][:1] == ["-m"] and "".join(request[2][1:2]).startswith("tests.")
    command = os.fork()
    if command == 0:
        client.close()
        if is_test:
            os.setsid()
        _become(streams, *request)
    for stream in streams:
        os.close(stream)
    threading.Thread(target=_end_with, args=(client, command), daemon=True).start()
    _, status = os.waitpid(command, 0)
    if is_test:  # its ranks end with it; those of commands have to end by themselves
        with suppress(ProcessLookupError):
            os.killpg(command, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(status)
    with suppress(BrokenPipeError):
        client.sendall(bytes([max(-code, 0), max(code, 0)]))
    os._exit(0)


def _end_with(client: socket.socket, command: int) -> None:
    """What follows a request are numbers of signals for the command, and the end of the client, which ends it."""
    with suppress(ProcessLookupError):
        while number := client.recv(1):
            os.kill(command, number[0])
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
        os.environ.update(environment, CUDA_VISIBLE_DEVICES="")
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
    try:
        serve(sys.argv[1])
    except BaseException:
        Path(sys.argv[1]).with_suffix(".failed").write_text(traceback.format_exc())
        raise
    finally:  # whoever has started it may have been killed
        sys.stdin.close()
        if not Path(sys.argv[1]).with_suffix(".failed").exists():
            shutil.rmtree(Path(sys.argv[1]).parent, ignore_errors=True)
