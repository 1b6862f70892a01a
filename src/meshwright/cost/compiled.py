"""One decorator for the hot loops: numba in nopython mode, compiled code cached on disk where that is possible.

numba keeps the cache beside the source file, or in the user's cache folder when that place cannot be written to.
When neither can (an installation owned by somebody else and no home folder), it refuses to decorate at all; the
loops then compile anew in each process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compile at the first call; later processes load the machine code if a cache folder can be written."""
    try:
        return cast("Function", numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:
        return cast("Function", numba.njit(nogil=True)(function))
