"""Modules beside a user's file: each file imports those of its own folder, as they are when it is loaded.

Two folders may each have a ``helper.py``, and one folder may have another ``helper.py`` later. So such a module is in
`sys.modules` only while a file is loaded or called (`Folder.importable`); its importer keeps it, and an import in a
later call finds it here. Files that are loaded in one block of `afresh` share modules; outside of such a block, the
modules of a folder are kept until one of their files has changed.
"""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Iterator, Sequence
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

if TYPE_CHECKING:
    from types import CodeType, ModuleType


class Folder:
    """Modules that were imported from a folder, by name."""

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
        """The spec of a module, if it is in the folder, or in a package of the folder."""
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
        """Whether all files still hold what was imported."""
        try:
            return all(Path(path).read_bytes() == content for path, content in self.sources.items())
        except OSError:
            return False

    def keep(self, module: ModuleType) -> None:
        """Record a module of the folder whose loading starts."""
        self._modules[module.__name__] = module

    def drop(self, module: ModuleType) -> None:
        """Remove a module that could not be loaded."""
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
        """Compile the source."""
        content = self.get_data(self.path)
        self._folder.sources[self.path] = content
        linecache.checkcache(self.path)
        return compile(content, self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        """Run it."""
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
    """Let all files that this thread loads in the block share their modules, but none that were loaded before."""
    _stack()
    before = _OF_THREAD.fresh
    _OF_THREAD.fresh = set()
    try:
        yield
    finally:
        _OF_THREAD.fresh = before


def folder_at(place: Path, *, is_loaded: bool = False) -> Folder:
    """A folder, with the modules that were last imported for its files.

    If one of its files ``is_loaded`` now, it is new in each block of `afresh`, and elsewhere if a module has changed.
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
