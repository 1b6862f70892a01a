"""One decorator for the hot loops: numba in nopython mode, compiled code cached on disk where that is possible.

numba keeps the cache beside the source file, or in the user's cache folder when that place cannot be written to.
When neither can (an installation owned by somebody else and no home folder), it refuses to decorate at all; the
loops then compile anew in each process. An index of the cache names the types of arguments; one that an older version
of this package left behind may name what is gone, and counts as empty. Machine code holds what the loop calls, too, but
numba looks at the loop's own file only to see whether it is fresh; here any file of its package makes it stale.

The first function that is loaded brings all of numba's own with it, some hundred thousand objects that stay. The
garbage collector would go through them again and again; it pauses meanwhile, which saves a tenth of the engine's start.
And numba imports all of scipy.linalg, in 0.2 s, to see whether it is there. Our loops need none of it, so that it is
looked for instead; a function that needs it imports it when it is compiled.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compile at the first call; later processes load the machine code if a cache folder can be written."""
    try:
        dispatcher = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:
        return cast("Function", numba.njit(nogil=True)(function))
    _depend_on_package(dispatcher, function)
    _forgive(dispatcher)
    _load_without_collecting(dispatcher)
    return cast("Function", dispatcher)


def uncompiled(scope: dict[str, Any], name: str) -> Callable[..., Any]:
    """A compiled function as plain Python, and so are those of its module that it calls; ``scope``: its globals."""
    plain = dict(scope)
    for each, item in scope.items():
        function = getattr(item, "py_func", None)
        if function is not None and function.__module__ == scope["__name__"]:
            plain[each] = FunctionType(function.__code__, plain, each, function.__defaults__)
    return cast("Callable[..., Any]", plain[name])


def _depend_on_package(dispatcher: Any, function: Callable[..., object]) -> None:
    """Let a change of any file of a package of ours count (numba 0.68, core/caching.py: IndexDataCacheFile)."""
    file: Any = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    house, _, package = function.__module__.partition(".")
    if hasattr(file, "_source_stamp") and package and house == __name__.partition(".")[0]:
        depth = len(package.split("."))
        source = Path(function.__code__.co_filename)
        is_package = source.name == "__init__.py"
        folder = source.parents[depth - 1 if is_package else max(depth - 2, 0)]
        file._source_stamp = (file._source_stamp, _stamp(folder))


@cache
def _stamp(folder: Path) -> str:
    """Names, sizes and times of all Python files of a folder and those below it."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        about = path.stat()
        found.update(f"{path.relative_to(folder)} {about.st_size} {about.st_mtime_ns}\n".encode())
    return found.hexdigest()


def _forgive(dispatcher: Any) -> None:
    """Let an index that cannot be read count as empty (numba 0.68, core/caching.py: IndexDataCacheFile)."""
    file: Any = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    load = getattr(file, "_load_index", None)
    if load is None:
        return

    def load_index() -> Any:
        try:
            return load()
        except Exception:  # unpickling may raise anything; what is compiled anew is right
            return {}

    file._load_index = load_index


def _load_without_collecting(dispatcher: Any) -> None:
    """Pause the garbage collector while machine code is loaded (numba 0.68, core/caching.py: Cache.load_overload)."""
    cache: Any = getattr(dispatcher, "_cache", None)
    load = getattr(cache, "load_overload", None)
    if load is None:
        return

    def load_overload(*arguments: Any) -> Any:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            _look_for_blas()
            return load(*arguments)
        finally:
            if was_enabled:
                gc.enable()

    cache.load_overload = load_overload


def _look_for_blas() -> None:
    """Import numba's functions of arrays without scipy.linalg (numba 0.68, np/arraymath.py: _check_blas)."""
    if "numba.np.arraymath" in sys.modules:
        return
    linalg: Any = importlib.import_module("numba.np.linalg")
    ensure_blas = getattr(linalg, "ensure_blas", None)
    if ensure_blas is None:  # another version of numba, which is left as it is
        return
    linalg.ensure_blas = _ensure_scipy
    try:
        importlib.import_module("numba.np.arraymath")
    finally:
        linalg.ensure_blas = ensure_blas


def _ensure_scipy() -> None:
    if importlib.util.find_spec("scipy") is None:
        raise ImportError("scipy is required for linear algebra; install it")
