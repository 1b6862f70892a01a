"""One decorator for the hot loops: numba in nopython mode, machine code cached on disk where that is possible.

numba keeps the cache next to the source file, or in the user's cache folder if that place is not writable. If neither
is writable (an installation owned by another user and no home folder), numba refuses to decorate at all; the loops are
then compiled in each process. Four things are our own:

- Machine code contains the functions that the loop calls, but numba only checks whether the loop's own file has
  changed. Here the name of a cache file contains a digest of the loop's module, of all modules that it imports,
  directly or indirectly, and of the constants of its module (numba freezes them, wherever they come from). An argument
  that is a named tuple has methods that the loop may call: the modules of its class are part of the key of that
  signature. So code that was compiled for one state of the sources is found when that state returns, and a change
  elsewhere compiles nothing. The cache keeps the last `_KEPT_STATES` used states of each loop, and the same number of
  states of the classes of a signature, those compiled last.
- Processes that need the same loop at once (ranks of a run, tests) compile it once: the others wait and load it. In
  numba's own cache, two processes that save different signatures of a loop at once may mix up their code.
- Compiled callers share one version of a loop, instead of one for each constant and each width of integers.
- An index of the cache names the types of arguments. An index that names a missing type cannot be read, and counts as
  empty.

The first function that is loaded imports numba's own modules, some hundred thousand objects that stay. The garbage
collector would scan them repeatedly; it pauses meanwhile, which saves a tenth of the engine's start. numba also imports
all of scipy.linalg, in 0.2 s, to check whether it is installed. Our loops do not use it, so this module only looks for
it; a function that needs it imports it when it is compiled.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba.core import types
from numba.core.caching import IndexDataCacheFile
from numba.core.compiler_lock import global_compiler_lock

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: every process compiles for itself
    fcntl = None

Function = TypeVar("Function", bound=Callable[..., object])

_KEPT_STATES = 3
# A process that waits longer for another one compiles for itself. The longest compilation, `simulate_events` with all
# that it calls, took 54 s on a busy machine of two cores (2026-11-26).
_LONGEST_WAIT_S, _LOOK_S = 300.0, 0.02
_LOCK_FILE = "meshwright-compiling.lock"


def compiled(function: Function) -> Function:
    """Return ``function`` compiled by numba at its first call; other processes load the machine code from the cache.

    If no cache folder is writable, every process compiles for itself.
    """
    try:
        dispatcher: Any = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:
        return cast("Function", numba.njit(nogil=True)(function))
    dispatcher._cache._cache_file = _CacheFile(dispatcher, function)
    _look_at_classes(dispatcher._cache)
    _share_versions(dispatcher)
    _compile_once(dispatcher)
    _load_without_collecting(dispatcher)
    return cast("Function", dispatcher)


def uncompiled(scope: dict[str, Any], name: str) -> Callable[..., Any]:
    """Return the compiled function ``name`` as plain Python; compiled functions of its module that it calls are, too.

    ``scope``: the globals of that module.
    """
    plain = dict(scope)
    for each, item in scope.items():
        function = getattr(item, "py_func", None)
        if function is not None and function.__module__ == scope["__name__"]:
            plain[each] = FunctionType(function.__code__, plain, each, function.__defaults__)
    return cast("Callable[..., Any]", plain[name])


class _CacheFile(IndexDataCacheFile):
    """The files of one loop: an index and the machine code of each signature (numba 0.68, core/caching.py)."""

    def __init__(self, dispatcher: Any, function: Callable[..., object]) -> None:
        given, base = dispatcher._cache._cache_file, dispatcher._cache._impl.filename_base
        state = _state(function)
        super().__init__(
            given._cache_path,
            f"{base}.{state}" if state else base,
            state or given._source_stamp,
        )
        # A loop that has moved to another line keeps its name.
        self._states = re.sub(r"-\d+\.py", "-*.py", base) + "*.nbi" if state else None

    def save(self, key: Any, data: Any) -> None:
        with _locked(self._cache_path, self._index_name):
            is_new = not Path(self._index_path).exists()
            self._forget_old_classes(key)
            super().save(key, data)
        if is_new and self._states:
            _forget_old_states(Path(self._cache_path), self._states)

    def _forget_old_classes(self, key: Any) -> None:
        """Keep a signature's code compiled last for other states of its classes, and leave room for this one."""
        overloads = self._load_index()
        others = [known for known in overloads if known[:-1] == key[:-1] and known != key]
        for known in others[: max(len(others) - _KEPT_STATES + 1, 0)]:
            with suppress(OSError):
                Path(self._data_path(overloads.pop(known))).unlink()
            self._save_index(overloads)

    def _load_index(self) -> Any:
        with suppress(OSError):  # a new time stamp marks the states in use
            os.utime(self._index_path)
        try:
            return super()._load_index()
        except Exception:  # unpickling may raise anything; compiling again is always right
            return {}


def _state(function: Callable[..., object]) -> str:
    """A digest of all contents that a loop may depend on; empty if its source is not available."""
    if _file_of(function.__module__) is None:
        return ""
    found = {contents_digest(function.__module__)}
    for name, item in function.__globals__.items():
        file = getattr(getattr(item, "_cache", None), "_cache_file", None)
        if isinstance(file, _CacheFile):
            found.add(str(file._source_stamp))
        elif isinstance(item, np.ndarray):
            found.add(f"{name}={item.dtype}{item.tolist()}")
        elif isinstance(item, (bool, int, float, str, tuple, np.generic)) and not name.startswith("__"):
            found.add(f"{name}={item!r}")
    return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()[:16]


def _look_at_classes(cache: Any) -> None:
    """Add a digest for each module that defines a class in a signature to its key (numba 0.68, core/caching.py)."""
    plain_key = cache._index_key

    def index_key(signature: Any, codegen: Any) -> Any:
        modules = sorted({module for kind in getattr(signature, "args", signature) for module in _modules_of(kind)})
        return (*plain_key(signature, codegen), tuple(map(contents_digest, modules)))

    cache._index_key = index_key


def _modules_of(kind: Any) -> Iterator[str]:
    """The modules that define the class of a named tuple, and the classes of its items."""
    if isinstance(kind, types.BaseTuple):
        if hasattr(kind, "instance_class"):
            yield kind.instance_class.__module__
        for item in cast("Any", kind):
            yield from _modules_of(item)


_HOUSE, _ROOT = __name__.partition(".")[0], Path(__file__).parent
# Compiled code cannot import. This finds the modules of ours that a module imports when it is loaded (a test checks).
_IMPORT = re.compile(rf"^(?:import|from) ({_HOUSE}(?:\.\w+)*)(?: import (\([^)]*\)|[^\n]*))?", re.MULTILINE)


@cache
def contents_digest(module: str) -> str:
    """Return a hash (16 hex digits) of the sources of a module and of all meshwright modules that it imports.

    Indirect imports count, too. ``module`` is a dotted name.
    """
    digests, left = {}, [module]
    while left:
        name = left.pop()
        if name not in digests:
            digests[name], imported = _read(name)
            left += imported
    return _digest("\n".join(f"{name} {digests[name]}" for name in sorted(digests)).encode())


@cache
def _read(module: str) -> tuple[str, tuple[str, ...]]:
    """A digest of a module's file, and the modules of ours that it imports."""
    path = _file_of(module)
    content = b"" if path is None else path.read_bytes()
    found: dict[str, None] = {}
    for name, items in _IMPORT.findall(content.decode()):
        found[name] = None
        file = _file_of(name)
        if file is not None and file.name == "__init__.py":
            inside = (f"{name}.{item}" for item in re.findall(r"\w+", items))
            found.update(dict.fromkeys(item for item in inside if _file_of(item) is not None))
    return _digest(content), tuple(found)


@cache
def _file_of(module: str) -> Path | None:
    house, *names = module.split(".")
    if house != _HOUSE:
        file = getattr(sys.modules.get(module), "__file__", None)
        return Path(file) if file is not None and file.endswith(".py") and Path(file).is_file() else None
    place = _ROOT.joinpath(*names)
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _forget_old_states(folder: Path, pattern: str) -> None:
    with suppress(OSError):  # another process deletes, too
        indexes = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for index in indexes[_KEPT_STATES:]:
            for path in (index, *folder.glob(f"{index.stem}.*.nbc")):
                path.unlink()


def _share_versions(dispatcher: Any) -> None:
    """Let compiled callers pass constants as numbers, and signed integers of fewer than 64 bits as int64.

    Of the 256 versions that a first simulation under `symphony` compiled, 99 differed only in these (2026-11-26).
    """
    find = dispatcher.get_call_template

    def get_call_template(args: tuple[Any, ...], kws: dict[str, Any]) -> Any:
        return find(tuple(map(_plain, args)), {name: _plain(kind) for name, kind in kws.items()})

    dispatcher.get_call_template = get_call_template


_NARROW = (types.int8, types.int16, types.int32)


def _plain(kind: Any) -> Any:
    if isinstance(kind, (types.IntegerLiteral, types.BooleanLiteral)):
        kind = types.unliteral(kind)
    return types.int64 if kind in _NARROW else kind


def _compile_once(dispatcher: Any) -> None:
    """Let one process at a time compile a signature; processes that waited for it load its machine code.

    This cannot deadlock. Loops call each other without cycles, so processes wait for each other's locks without cycles.
    Threads of a process take numba's own lock first, and a thread that holds it waits for other processes only.
    """
    compile_signature, folder = dispatcher.compile, dispatcher._cache.cache_path
    base = dispatcher._cache._impl.filename_base

    def compile_once(signature: Any) -> Any:
        with global_compiler_lock, _locked(folder, f"{base} {signature}"):
            return compile_signature(signature)

    dispatcher.compile = compile_once


@contextmanager
def _locked(folder: str, name: str) -> Iterator[None]:
    """Hold the machine-wide lock of this name; continue without it after `_LONGEST_WAIT_S` or if locks are missing.

    Locks are bytes of one file: a process may take a lock that it already holds, and its locks end with it. Names that
    map to the same byte wait for each other.
    """
    file, place = _lock_file(folder, os.getpid()), zlib.crc32(name.encode())
    if file is None or place in _HELD or not _wait_for(file, place):
        yield
        return
    _HELD.add(place)
    try:
        yield
    finally:
        _HELD.discard(place)
        fcntl.lockf(file, fcntl.LOCK_UN, 1, place)


_HELD: set[int] = set()


@cache
def _lock_file(folder: str, _process: int) -> int | None:
    """A descriptor of the file of locks, one per process, kept open: closing one would release all its locks."""
    if fcntl is None:
        return None
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        return os.open(Path(folder, _LOCK_FILE), os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        return None


def _wait_for(file: int, place: int) -> bool:
    end = time.monotonic() + _LONGEST_WAIT_S
    while time.monotonic() < end:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except BlockingIOError:
            time.sleep(_LOOK_S)
        except OSError:  # a file system without locks
            return False
        else:
            return True
    return False


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
    """Import numba's array functions without scipy.linalg (numba 0.68, np/arraymath.py: _check_blas)."""
    if "numba.np.arraymath" in sys.modules:
        return
    linalg: Any = importlib.import_module("numba.np.linalg")
    ensure_blas = getattr(linalg, "ensure_blas", None)
    if ensure_blas is None:  # another version of numba, which stays as it is
        return
    linalg.ensure_blas = _ensure_scipy
    try:
        importlib.import_module("numba.np.arraymath")
    finally:
        linalg.ensure_blas = ensure_blas


def _ensure_scipy() -> None:
    if importlib.util.find_spec("scipy") is None:
        raise ImportError("scipy is required for linear algebra; install it")
