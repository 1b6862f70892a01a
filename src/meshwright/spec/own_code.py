"""Functions in a user's own files: how ``path/to/file.py:function`` is found, run and read (`load_function`).

While a file is loaded or its function called, the modules of its folder can be imported (`Folder`). Any exception in it
becomes an error whose message is one paragraph with the exception's message and line. The caller chooses the class of
errors, and describes what the function should return. Paths are as in a shell: relative to the working directory, with
``~`` for the home folder. `own_loss` finds the loss in a model's output.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import linecache
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    PathFinder,
    SourceFileLoader,
)
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.spec.errors import MeshwrightError, suggest
from meshwright.spec.files import read_regular

if TYPE_CHECKING:
    from types import CodeType, ModuleType


# Each file imports the modules of its own folder, as they are when it is loaded. Two folders may each have a
# ``helper.py``, and one folder may have another ``helper.py`` later. So such a module is in `sys.modules` only while a
# file is loaded or called (`Folder.importable`); its importer keeps it, and an import in a later call finds it here.
# Files that are loaded in one block of `afresh` share modules; outside of such a block, the modules of a folder are
# kept until one of their files has changed.
class Folder:
    """A folder of a user's files, with the modules that were imported from it.

    ``sources`` has the content of each imported file, by path.
    """

    def __init__(self, path: Path) -> None:
        self._path = str(path.resolve())
        self._modules: dict[str, ModuleType] = {}
        self.sources: dict[str, bytes] = {}

    @contextmanager
    def importable(self) -> Iterator[None]:
        """Let ``import`` find the files of the folder, before all others, while the block runs."""
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)
        mine = _stack()
        # For threads that are started meanwhile, and for packages without a file.
        sys.path.insert(0, self._path)
        mine.append(self)
        _EVERYWHERE.append(self)
        try:
            yield
        finally:
            mine.pop()
            _EVERYWHERE.remove(self)
            sys.path.remove(self._path)
            if self not in _EVERYWHERE:
                self._take_out()

    def find(self, name: str, within: Sequence[str] | None) -> ModuleSpec | None:
        """Return the import spec of module ``name`` if it is in the folder or in a package of the folder, else None.

        ``within`` is the search path of the package that contains the module; None for a top-level module.
        """
        if name in self._modules:
            known = self._modules[name]
            return ModuleSpec(
                name, _Known(known), origin=getattr(known, "__file__", None), is_package=hasattr(known, "__path__")
            )
        if within is None:
            places: Sequence[str] = [self._path]
        elif name.partition(".")[0] in self._modules:
            places = list(within)
        else:
            return None
        for place in places:
            loaders: list[Any] = [(ExtensionFileLoader, EXTENSION_SUFFIXES), (self._loader, SOURCE_SUFFIXES)]
            spec = FileFinder(place, *loaders).find_spec(name)
            if spec is not None and spec.loader is not None:
                return spec
            if spec is not None and not _is_found(name, within):
                # A package without a file of its own; packages that have one take precedence, wherever they are.
                spec.loader = _Bare(self)
                return spec
        return None

    def is_as_loaded(self) -> bool:
        """Return whether all imported files are unchanged since they were imported."""
        try:
            return all(Path(path).read_bytes() == content for path, content in self.sources.items())
        except OSError:
            return False

    def keep(self, module: ModuleType) -> None:
        """Record a module of the folder when its loading starts."""
        self._modules[module.__name__] = module

    def drop(self, module: ModuleType) -> None:
        """Remove the record of a module that could not be loaded."""
        self._modules.pop(module.__name__, None)

    def _loader(self, name: str, path: str) -> _Source:
        return _Source(name, path, self)

    def _take_out(self) -> None:
        for name, module in list(self._modules.items()):
            if sys.modules.get(name) is module:
                del sys.modules[name]


class _Source(SourceFileLoader):
    """Loads a file's current source: compiled files may be stale if size and second of change are equal."""

    def __init__(self, name: str, path: str, folder: Folder) -> None:
        super().__init__(name, path)
        self._folder = folder

    def get_code(self, _fullname: str) -> CodeType:
        """Return the compiled source."""
        content = self.get_data(self.path)
        self._folder.sources[self.path] = content
        linecache.checkcache(self.path)
        return compile(content, self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, and record it in the folder."""
        self._folder.keep(module)
        try:
            super().exec_module(module)
        except BaseException:
            self._folder.drop(module)
            raise


class _Bare(Loader):
    """Loads a package that is only a folder."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def create_module(self, _spec: ModuleSpec) -> None:
        """Use the default module creation."""

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the package has no code."""
        self._folder.keep(module)


class _Known(Loader):
    """Returns a module that was imported before."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, _spec: ModuleSpec) -> ModuleType:
        """The known module."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module has run."""
        module.__spec__ = self._spec


def _is_found(name: str, within: Sequence[str] | None) -> bool:
    """Whether `sys.path`, or a package's path, leads to a module with a file."""
    spec = PathFinder.find_spec(name, within)
    return spec is not None and spec.loader is not None


class _Finder:
    """The finder of all folders: it uses the block of the current thread, or of the thread that started it."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, _target: Any = None) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        for folder in reversed(_stack() or _EVERYWHERE[-1:]):
            if (spec := folder.find(name, path)) is not None:
                return spec
        return None


_FINDER: Any = _Finder()
_EVERYWHERE: list[Folder] = []
_OF_THREAD = threading.local()
_FOLDERS: dict[Path, Folder] = {}


def _stack() -> list[Folder]:
    """The folders whose blocks this thread has entered."""
    if not hasattr(_OF_THREAD, "stack"):
        _OF_THREAD.stack, _OF_THREAD.fresh = [], None
    stack: list[Folder] = _OF_THREAD.stack
    return stack


@contextmanager
def afresh() -> Iterator[None]:
    """While the block runs, load user files with newly imported helper modules.

    All files that this thread loads in the block share these modules; modules imported before the block are not used.
    """
    _stack()
    before = _OF_THREAD.fresh
    _OF_THREAD.fresh = set()
    try:
        yield
    finally:
        _OF_THREAD.fresh = before


def folder_at(place: Path, *, is_loaded: bool = False) -> Folder:
    """Return the `Folder` of a path, with the modules that were last imported for its files.

    ``is_loaded``: one of its files is about to be loaded. Then the folder starts without modules, in every block of
    `afresh` once, and outside of such blocks if one of its imported files has changed.
    """
    place = place.resolve()
    _stack()
    fresh: set[Path] | None = _OF_THREAD.fresh
    folder = _FOLDERS.get(place)
    is_stale = folder is None or (
        is_loaded and (place not in fresh if fresh is not None else not folder.is_as_loaded())
    )
    if folder is None or is_stale:
        _FOLDERS[place] = folder = Folder(place)
    if fresh is not None and is_loaded:
        fresh.add(place)
    return folder


# Users' source files are thousands of times smaller; a device or a data file is refused instead of read.
MAX_SOURCE_BYTES = 16 * 2**20


def split_reference(reference: str) -> tuple[Path, str] | None:
    """Split ``path/to/file.py:function`` into (path, name); return None if the reference has another form."""
    path, separator, name = reference.rpartition(":")
    return (Path(path).expanduser(), name) if separator and path.endswith(".py") else None


def known_parts(reference: str) -> tuple[Path, str]:
    """Split a reference that is known to be ``path/to/file.py:name`` into (path, name)."""
    parts = split_reference(reference)
    assert parts is not None, f"{reference!r} is not path/to/file.py:name"
    return parts


def order_file(reference: str) -> Path | None:
    """Return the path of ``path/to/orders.csv``, a file with the order of computations of every rank.

    Returns None if the reference has another form.
    """
    return Path(reference).expanduser() if reference.endswith(".csv") else None


def read_source(path: Path, expected: str, error: type[MeshwrightError]) -> bytes:
    """Return the content of a Python file. Raises ``error`` if it cannot be read.

    ``expected`` describes the function to give, for messages: "returns ...".
    """
    if not path.exists() or path.is_dir():
        nearby = sorted(item.name for item in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise error(
            f"There is no file {str(path)!r}{suggest(path.name, nearby)}. Give the path of a Python file and a "
            f"function in it that {expected}."
        )
    content = read_regular(path, MAX_SOURCE_BYTES + 1, error)
    if len(content) > MAX_SOURCE_BYTES:
        raise error(f"{path}: more than {MAX_SOURCE_BYTES} bytes, the limit of Python files. Check the path.")
    return content


# A result of `source_hash`.
HASH = re.compile(r"[0-9a-f]{16}")


def source_hash(content: bytes) -> str:
    """Return the hash of a file's content: 16 hexadecimal digits of SHA-256, as for documents."""
    return hashlib.sha256(content).hexdigest()[:16]


def load_function(
    path: Path, name: str, *, expected: str, error: type[MeshwrightError], content: bytes | None = None
) -> Callable[..., Any]:
    """Run the Python file at ``path`` and return its callable ``name``.

    ``expected`` describes the function for messages: "returns ...". ``content``: the file's content, if it was read
    already. Raises ``error`` if the file fails or has no such callable.
    """
    content = read_source(path, expected, error) if content is None else content
    module = _run_file(path, content, error)
    function = getattr(module, name, None)
    if not callable(function):
        known = [
            key
            for key, item in vars(module).items()
            if (inspect.isfunction(item) or inspect.isclass(item)) and item.__module__ == module.__name__
        ]
        raise error(f"{path} has no function {name!r}{suggest(name, known)}. Name a function that {expected}.")
    return function  # type: ignore[no-any-return]


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Let ``import`` find the files of a folder, before all others, while the block runs."""
    with folder_at(folder).importable():
        yield


@contextmanager
def reported(path: Path, what: str, error: type[MeshwrightError], *, otherwise: str = "") -> Iterator[None]:
    """Turn exceptions of a user's code into ``error``, with the exception's message and line.

    ``path`` is the user's file; messages begin with ``what`` ("Loading mine.py raised"). ``otherwise`` is named instead
    of a line if no line of the file is in the traceback.
    """
    try:
        yield
    except error:
        raise
    except (Exception, SystemExit) as problem:
        message = " ".join(str(problem).split()) or "no message"
        place = own_line(problem, path, otherwise)
        raise error(f"{what} {type(problem).__name__}: {message} ({place}). Correct it and try again.") from problem


def own_line(problem: BaseException, path: Path, otherwise: str = "") -> str:
    """Return file, line number and text of the innermost line of the user's file in a traceback.

    For a syntax error it is the line of that error. Without a line of the file, return ``otherwise`` or the path.
    """
    if isinstance(problem, SyntaxError) and problem.filename:
        return f"{problem.filename}:{problem.lineno}: {(problem.text or '').strip()}"
    frames = traceback.extract_tb(problem.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    if not own:
        return otherwise or str(path)
    return source_line(path, own[-1].lineno or 0)


def first_line(function: Callable[..., Any], path: Path) -> str:
    """Return file, number and text of a function's first line; the file alone if the function is from another file."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or Path(code.co_filename).resolve() != path.resolve():
        return str(path)
    return source_line(path, code.co_firstlineno)


def source_line(path: Path, line: int) -> str:
    """Return file, number and text of a line: ``path/to/file.py:12: yield Forward(...)``."""
    return f"{path}:{line}: {linecache.getline(str(path.resolve()), line).strip()}"


def own_loss(output: Any) -> Any:
    """Return the loss that a model computes: the scalar ``loss`` in its output, or else its whole output.

    Hugging Face models return an output with ``loss`` for a batch with labels.
    """
    found: Any = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    is_tensor = callable(getattr(found, "is_floating_point", None))
    return found if is_tensor and found.is_floating_point() and found.ndim == 0 else output


def _run_file(path: Path, content: bytes, error: type[MeshwrightError]) -> ModuleType:
    # Two files of one name get different module names, and a file has the same one in each process.
    place = source_hash(str(path.resolve()).encode("utf-8", "surrogateescape"))
    spec = importlib.util.spec_from_file_location(f"meshwright_own_{path.stem}_{place}", path)
    if spec is None or spec.loader is None:
        raise error(f"{path} is not a Python file; give one whose name ends with .py.")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look up the module of the file's classes here.
    sys.modules[spec.name] = module
    linecache.checkcache(str(path.resolve()))
    folder = folder_at(path.parent, is_loaded=True)
    with folder.importable(), reported(path, f"Loading {path} raised", error):
        # The content that was read (and perhaps hashed) is run, not the file's content by now.
        exec(compile(content, str(path.resolve()), "exec", dont_inherit=True), vars(module))
    return module
