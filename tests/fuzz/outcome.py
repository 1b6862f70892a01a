"""What happened to a case: fine, or what went wrong with it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from unittest.mock import patch

from meshwright.cli.main import invoke
from meshwright.playground import PlaygroundServer
from tests.fuzz.cases import Case
from tests.fuzz.corpus import TRAP
from tests.fuzz.requests import shared_server

# Files that a line names as its results, and those of the trap.
_RESULTS = {"made.json", "trace.json", "timeline.json", "comparison.json", "page.html", "mine.py"}
_TRAP = {"trap.py", "__pycache__", "harmed"}
_EXIT_CODES = (0, 1, 2, 3)
LIMIT_S = 20


class TooLongError(BaseException):
    """Raised by the clock; no handler for errors may catch it."""


def try_case(case: Case) -> str | None:
    """Run a case in a folder of its own; None if it was taken well, else what happened."""
    if case.request:
        return _try_request(case.request)
    with tempfile.TemporaryDirectory() as above:
        folder = Path(above) / "here"
        folder.mkdir()
        (folder / "trap.py").write_text(TRAP)
        for name, content in case.files.items():
            (folder / name).write_bytes(content)
        # As Python sets them up: what cannot be encoded is an error on standard output and escaped on standard error.
        output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
        errors = io.TextIOWrapper(output.buffer, encoding="utf-8", errors="backslashreplace", write_through=True)
        previous = Path.cwd()
        os.chdir(folder)
        try:
            with _surroundings(output, errors):
                code = invoke(list(case.arguments))
        except TooLongError as error:
            return f"longer than {LIMIT_S} s in {_place(error)}"
        except BaseException as error:  # every kind is a finding
            return f"{type(error).__name__} in {_place(error)}"
        finally:
            os.chdir(previous)
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        return _judge(case, code, output.buffer.getvalue().decode(), folder)


@contextlib.contextmanager
def _surroundings(output: io.TextIOWrapper, errors: io.TextIOWrapper) -> Iterator[None]:
    served = patch("meshwright.cli.play.serve", _answer_once)
    with _time_limit(), served, contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        yield


def _answer_once(server: PlaygroundServer, started: Callable[[str], None]) -> None:
    """What stands in for serving: the first state is answered, then it is over."""
    started(server.url)
    try:
        options = json.loads(server.service.get("/options", "").body)
        body = json.dumps({"query": options["start"], "page": "p", "number": 1}).encode()
        json.loads(server.service.post("/answer", body).body)
    finally:
        server.service.close()
        server.server_close()


def _try_request(content: bytes) -> str | None:
    """Let the playground's handler read a request from a socket and answer it, in this thread."""
    server = shared_server()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ours, theirs:
        ours.settimeout(LIMIT_S)
        sender = threading.Thread(target=_send, args=(ours, content))
        reader = threading.Thread(target=_drain, args=(ours, reply := bytearray()))
        sender.start()
        reader.start()
        try:
            with _time_limit():
                server.RequestHandlerClass(theirs, ("127.0.0.1", 0), server)
        except TooLongError as error:
            return f"longer than {LIMIT_S} s in {_place(error)}"
        except (ConnectionError, TimeoutError):
            pass
        except BaseException as error:  # every kind is a finding
            return f"{type(error).__name__} in {_place(error)}"
        finally:
            with contextlib.suppress(OSError):
                theirs.shutdown(socket.SHUT_RDWR)
            sender.join()
            reader.join()
    found = b"is a defect of Meshwright" in reply or b"Traceback" in reply
    return f"a defect: {bytes(reply)[-200:]!r}" if found else None


def _send(end: socket.socket, content: bytes) -> None:
    with contextlib.suppress(OSError):
        end.sendall(content)
        end.shutdown(socket.SHUT_WR)


def _drain(end: socket.socket, reply: bytearray) -> None:
    with contextlib.suppress(OSError):
        while piece := end.recv(2**16):
            reply += piece


def _judge(case: Case, code: int, output: str, folder: Path) -> str | None:
    if code not in _EXIT_CODES:
        return f"exit code {code}"
    if "Traceback (most recent call last)" in output:
        return "a traceback was printed"
    if (folder / "harmed").exists() and not any("trap.py" in word for word in case.arguments):
        return "a file that was only named in a document was executed"
    outside = {path.name for path in folder.parent.iterdir()} - {"here"}
    if outside and not any(".." in word for word in case.arguments):
        return f"files appeared outside the folder: {sorted(outside)}"
    wanted = _RESULTS | _TRAP | set(case.files)
    written = {path.name for path in folder.iterdir()} - wanted
    asked = ("-o", "--out", "--trace", "--html", "--launch", "--find-orders")
    if written and not any(word in asked for word in case.arguments):
        return f"files appeared that nobody asked for: {sorted(written)[:3]}"
    page = folder / "page.html"
    if page.exists() and any(word in page.read_text() for word in ("<script>alert(1)", "<img src=x")):
        return "markup of a document stands in a page as it is"
    return None


def _place(error: BaseException) -> str:
    """The innermost line of Meshwright's own on the way to the error."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "meshwright" in frame.filename and "site-packages" not in frame.filename]
    frame = own[-1] if own else frames[-1]
    return f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno}"


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def ring(_number: int, _frame: FrameType | None) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
