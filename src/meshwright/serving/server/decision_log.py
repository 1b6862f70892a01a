"""The log file of a scheduler's decisions: its format, and how write errors are handled.

A log starts with a header, a line of JSON: kind of file, policy, and the arguments with which the policy's pool was
allocated. Each call of `Live.take` appends int64 numbers: the counts of events, decisions and chosen requests, then
the events, the decisions and the requests. `ANEW` in place of the three counts means that another header follows,
because the policy was restarted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np

from meshwright.serving.server.reports import report
from meshwright.spec import ServingError

LOG_KIND = "meshwright/decisions/1"
ANEW = np.array([-2, -2, -2], np.int64).tobytes()
_BEGIN = b'{"kind": "meshwright/decisions/'


class DecisionWriter(Protocol):
    """A destination of logged decisions, such as a file."""

    def write(self, data: bytes, /) -> object:
        """Write bytes."""

    def writelines(self, parts: Iterable[bytes], /) -> object:
        """Write several pieces, one after the other."""


class LogFile:
    """A decision log in a file. The first write error is reported, and ends the log; the server continues."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_broken = False
        try:
            check_log(path)
            self._file = path.open("wb")
        except (OSError, ServingError) as error:
            self._end(error)

    def write(self, data: bytes) -> None:
        """See `DecisionWriter`."""
        self.writelines((data,))

    def writelines(self, parts: Iterable[bytes]) -> None:
        """See `DecisionWriter`."""
        if not self._is_broken:
            try:
                self._file.writelines(parts)
            except OSError as error:
                self._end(error)
                with contextlib.suppress(OSError):
                    self._file.close()

    def close(self) -> None:
        """Close the file."""
        if not self._is_broken:
            try:
                self._file.close()
            except OSError as error:
                self._end(error)

    def _end(self, error: Exception) -> None:
        self._is_broken = True
        why = getattr(error, "strerror", None) or str(error)
        report("unlogged", text=f"The log {self._path} cannot be written ({why}); decisions are no longer logged.")


def check_log(path: Path) -> None:
    """Raise ServingError unless a log can be written to ``path``: a new file, or one that is a log already."""
    if path.is_dir() or not path.parent.is_dir():
        why = "is a folder" if path.is_dir() else f"is in {str(path.parent)!r}, which is not a folder"
        raise ServingError(f"The log {str(path)!r} {why}. Give the name of a file in an existing folder.")
    is_new = not path.exists()
    try:
        if path.is_file():
            with path.open("rb") as file:
                begin = file.read(len(_BEGIN))
            if begin not in (b"", _BEGIN):
                raise ServingError(
                    f"{str(path)!r} is not a log of decisions, and a log would overwrite it. Choose another "
                    "name, or remove it."
                )
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise ServingError(f"The log {str(path)!r} cannot be written: {error.strerror}. Choose another file.") from None
