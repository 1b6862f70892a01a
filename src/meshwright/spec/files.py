"""Read and write files safely: only regular files (also through links), reads up to a size, writes atomically.

Named pipes, devices and folders are refused, because opening a pipe waits for a writer that may never come, and
renaming a file over a pipe or a device removes it. A file is written next to its target and renamed, so that no file is
ever half-written. The caller of a read chooses the class of errors.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from meshwright.spec.errors import DocumentError, MeshwrightError

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read_regular(path: Path, max_bytes: int, error: type[MeshwrightError] = DocumentError) -> bytes:
    """Return at most the first ``max_bytes`` of a file. Raises ``error`` with the reason if it cannot be read."""
    try:
        _refuse_special(path, error, "read", "Give the path of a file.")
        with path.open("rb") as file:
            return file.read(max_bytes)
    except OSError as problem:
        remedy = "Check its permissions" if isinstance(problem, PermissionError) else "Check the path"
        raise error(f"{path}: cannot be read ({problem.strerror}). {remedy}.") from None


def refuse_replacing(path: Path) -> None:
    """Raise DocumentError if ``path``, to which a file is to be written, is something other than a regular file."""
    try:
        _refuse_special(path, DocumentError, "written", "Choose another path.", absent_ok=True)
    except OSError as problem:
        raise DocumentError(f"{path}: cannot be written ({problem.strerror}). Choose a writable place.") from None


def write_text(text: str | Iterable[str], path: Path | str) -> Path:
    """Write a text file, given whole or in pieces, atomically (write next to it, then rename)."""
    # The same bytes on every system: a script or a document may be moved to another one.
    pieces = (text,) if isinstance(text, str) else text
    return _write((piece.encode() for piece in pieces), Path(path))


def write_bytes(content: bytes | Iterable[bytes], path: Path | str) -> Path:
    """Write a binary file, given whole or in pieces, atomically (write next to it, then rename)."""
    return _write((content,) if isinstance(content, bytes) else content, Path(path))


def _write(pieces: Iterable[bytes], path: Path) -> Path:
    try:
        refuse_replacing(path)
        _replace_file(pieces, path)
    except OSError as error:
        raise DocumentError(f"{path}: cannot be written ({error.strerror}). Choose a writable place.") from None
    return path


def _replace_file(pieces: Iterable[bytes], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(pieces)
        # mkstemp makes private files; give the result the permissions of any new file.
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _refuse_special(
    path: Path, error: type[MeshwrightError], verb: str, remedy: str, *, absent_ok: bool = False
) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if absent_ok:
            return
        raise
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise error(f"{path}: cannot be {verb}: it is {kind}, not a file. {remedy}")


def make_folder(folder: Path) -> None:
    """Make a folder unless it exists, and check that it is writable. Raises OSError if it is not."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
