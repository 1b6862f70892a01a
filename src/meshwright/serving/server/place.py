"""What a server takes of its machine for as long as it lives: a port, and a folder in shared memory."""

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
except ImportError:  # elsewhere than on Linux and macOS nobody serves
    fcntl = None  # type: ignore[assignment]

# Shared memory; a folder elsewhere does, too, where the system has none.
_MEMORY = Path("/dev/shm")
_PREFIX = "meshwright-serve-"


@contextlib.contextmanager
def reserved_port(host: str, port: int) -> Any:
    """This port, or a free one for 0; fronts share it, and nobody else gets it meanwhile."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as reserved:
        try:
            # Without sharing first: what listens there already is found.
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            with socket.socket(reserved.family) as alone:
                alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                alone.bind((host, port))
            reserved.bind((host, port))
        except (OSError, ValueError) as error:  # ValueError: what cannot be the name of a host
            why = getattr(error, "strerror", None) or str(error)
            raise ServingError(
                f"Nothing can listen at {host} port {port}: {why}. Choose another port, or 0 for a free one."
            ) from None
        yield reserved.getsockname()[1]


@contextlib.contextmanager
def own_folder() -> Any:
    """A folder in shared memory for sockets and slabs; what servers left behind that were killed is removed."""
    memory = _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    for left in memory.glob(f"{_PREFIX}*"):
        owner = left.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            # A server in another container has the memory in common with this one, and not its processes.
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
    """A folder that no living server has. Raises OSError if one has it, or it is somebody else's."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        if hasattr(os, "getuid") and os.fstat(opened).st_uid != os.getuid():
            raise PermissionError
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(opened)
