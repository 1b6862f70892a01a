"""The server that a page starts: ``meshwright serve FILE &`` runs until ``kill %1``, or the end of the page.

On a page that has such a command, the ports 8000 to 8002 of addresses stand for free ones of this machine. A server
gets these as options, and its command has ended when it says that it is ready.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.processes import free_port

_READY_S, _END_S, _LOOK_S = 120.0, 60.0, 0.05
# Of addresses, and the options that they are of.
_PORTS = {":8000": "--port", ":8001": "--grpc-port", ":8002": "--admin-port"}
END = "kill %1"
# Its whole sentence, over however many lines.
_READY = re.compile(r"^Ready: [^\0]*\.\n", re.MULTILINE)


def is_background(command: str) -> bool:
    """Whether a command of a page is left running."""
    return command.endswith(" &")


class Background:
    """At most one process at a time; ``ports`` are those of this machine by those of the page."""

    def __init__(self, folder: Path, output: Path, environment: dict[str, str]) -> None:
        self._folder, self._output, self._environment = folder, output, environment
        self.ports = {port: f":{free_port()}" for port in _PORTS}
        self._process: subprocess.Popen[bytes] | None = None

    def typed(self, text: str) -> str:
        """What a page says, with the ports that there are."""
        for shown, real in self.ports.items():
            text = text.replace(shown, real)
        return text

    def shown(self, text: str) -> str:
        """What was printed, with the ports that the page names."""
        for shown, real in self.ports.items():
            text = text.replace(real, shown)
        return text

    def start(self, command: str) -> tuple[int, str]:
        """Start a server; 0 and what it has printed once it is ready, or what it has ended with."""
        assert self._process is None, f"{command}: the page has a server already; end it with {END}"
        program, *words = shlex.split(command.removesuffix("&"))
        assert program == "meshwright", f"{command}: only meshwright runs in the background of a page"
        ports = [word for shown, option in _PORTS.items() for word in (option, self.ports[shown][1:])]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", program, *words, *ports],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        end = time.monotonic() + _READY_S
        while (code := self._process.poll()) is None and not _READY.search(self._text()):
            if time.monotonic() > end:
                raise TimeoutError(f"{command}: not ready after {_READY_S:g} s:\n{self._text()}")
            time.sleep(_LOOK_S)
        return code or 0, self._text()

    def end(self) -> tuple[int, str]:
        """Tell the server to end; what it ended with, and what it has printed since it was ready."""
        process, self._process = self._process, None
        if process is None:
            return 0, ""
        before = len(self._text())
        try:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            code = process.wait(_END_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return code, self._text()[before:]

    def _text(self) -> str:
        return self.shown(self._output.read_text())
