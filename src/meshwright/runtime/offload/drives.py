"""A file on the drives of a host, for states that are read and written piece by piece.

The file has no name: its space is freed however the process ends, also by a kill. Reads and writes bypass the system's
cache (``O_DIRECT``) if the file system supports it, in whole pages; otherwise they use it. Its space is allocated
before the first step, so that a full drive is noticed then.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from pathlib import Path

from meshwright.runtime.offload.memory import HostBuffer, round_up
from meshwright.runtime.offload.room import FOLDER_ADVICE, check_folder
from meshwright.spec.errors import RunError
from meshwright.spec.units import format_bytes

# The unit of direct reads and writes: the size of a page, which is a multiple of the blocks of drives.
PAGE_BYTES = mmap.PAGESIZE


class DriveFile:
    """A file without a name in a folder, with room for ``num_bytes``. Raises RunError if it cannot be created.

    ``is_direct``: reads and writes bypass the cache.
    """

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.folder, self._end = folder, 0
        self.num_bytes = round_up(num_bytes, PAGE_BYTES)
        check_folder(folder)
        self._file, self.is_direct = _open_nameless(folder)
        self._take_room(self.num_bytes)

    def reserve(self, num_bytes: int) -> int:
        """Reserve whole pages; return the offset of the first."""
        start, self._end = self._end, self._end + round_up(num_bytes, PAGE_BYTES)
        if self._end > self.num_bytes:
            # An optimizer with more states than the plan assumes.
            self._take_room(self._end)
            self.num_bytes = self._end
        return start

    def read(self, start: int, into: memoryview) -> None:
        """Fill memory from the file, starting at an offset."""
        done = 0
        while done < len(into):
            count = os.preadv(self._file, [into[done:]], start + done)
            if not count:
                raise RunError(f"{self.folder}: the file of optimizer states ended early. Start the run again.")
            done += count

    def write(self, start: int, values: memoryview) -> None:
        """Write memory to the file, starting at an offset. Raises RunError if the drive refuses."""
        done = 0
        try:
            while done < len(values):
                done += os.pwritev(self._file, [values[done:]], start + done)
        except OSError as error:
            raise RunError(
                f"{self.folder}: optimizer states cannot be written there ({error.strerror or error}). {FOLDER_ADVICE}"
            ) from None

    def map(self, start: int, num_bytes: int) -> HostBuffer:
        """A part of the file as memory, which is read on access."""
        return HostBuffer(num_bytes, memory=mmap.mmap(self._file, num_bytes, offset=start))

    def close(self) -> None:
        """Free the space."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _take_room(self, num_bytes: int) -> None:
        if not num_bytes:
            return
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file, 0, num_bytes)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                return
            self.close()
            raise RunError(
                f"{self.folder}: has no room for {format_bytes(num_bytes)} of optimizer states "
                f"({error.strerror or error}). {FOLDER_ADVICE}"
            ) from None


def _open_nameless(folder: Path) -> tuple[int, bool]:
    """A new file without a name, and whether it bypasses the cache."""
    for direct in (getattr(os, "O_DIRECT", 0), 0):
        try:
            if hasattr(os, "O_TMPFILE"):
                return os.open(folder, os.O_TMPFILE | os.O_RDWR | direct, 0o600), bool(direct)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
                raise
    file, name = tempfile.mkstemp(dir=folder, prefix=".offload-")
    Path(name).unlink()
    return file, False
