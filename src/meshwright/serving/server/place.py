"""Resources of the machine that a server holds while it runs: a port, and a folder in shared memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

from meshwright.spec import ServingError

try:
    import fcntl
except ImportError:  # a server runs on Linux or macOS only
    fcntl = None  # type: ignore[assignment]

# Shared memory; systems without it use a normal temporary folder.
_MEMORY = Path("/dev/shm")
_PREFIX = "meshwright-serve-"


@contextlib.contextmanager
def reserved_port(host: str, port: int) -> Any:
    """Reserve a port, or a free port if it is 0, and yield its number.

    Frontends listen at it together, and no other program gets it meanwhile. Raises ServingError if it is in use.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as reserved:
        try:
            # First try without sharing: this detects another listener.
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            with socket.socket(reserved.family) as alone:
                alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                alone.bind((host, port))
            reserved.bind((host, port))
        except (OSError, ValueError) as error:  # ValueError: an invalid host name
            why = getattr(error, "strerror", None) or str(error)
            raise ServingError(
                f"Nothing can listen at {host} port {port}: {why}. Choose another port, or 0 for a free one."
            ) from None
        yield reserved.getsockname()[1]


@contextlib.contextmanager
def own_folder() -> Any:
    """Yield a new folder in shared memory for sockets and slabs; first remove folders of servers that were killed."""
    memory = _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    for left in memory.glob(f"{_PREFIX}*"):
        owner = left.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            # Another container's server may share this memory without its processes being visible: check the lock.
            with contextlib.suppress(OSError), _locked(left):
                shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=memory))
    try:
        with _locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Any:
    """Lock a folder that no running server owns. Raises OSError if one does, or another user does."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        if hasattr(os, "getuid") and os.fstat(opened).st_uid != os.getuid():
            raise PermissionError
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(opened)
