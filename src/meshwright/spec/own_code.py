"""Functions in a user's own files: ``path/to/file.py:function`` is located, run like a script, and read.

A file's folder is importable while it is loaded and called (`beside`). Any exception becomes one paragraph with its own
message and line. The caller says what the function should return and which error class reports a fault. Paths are those
of the shell: relative to the working directory, with ``~`` for the home folder. `own_loss` is the loss of a user's
model.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import linecache
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.spec.beside import folder_at
from meshwright.spec.errors import MeshwrightError, suggest
from meshwright.spec.files import read_regular

if TYPE_CHECKING:
    from types import ModuleType

# Users' source files are thousands of times smaller; a device or a data file is refused instead of read.
MAX_SOURCE_BYTES = 16 * 2**20


def split_reference(reference: str) -> tuple[Path, str] | None:
    """``path/to/file.py:function`` as path and name; None if it has another form."""
    path, separator, name = reference.rpartition(":")
    return (Path(path).expanduser(), name) if separator and path.endswith(".py") else None


def order_file(reference: str) -> Path | None:
    """``path/to/orders.csv``, a file that lists the order of every rank, as a path; None if it has another form."""
    return Path(reference).expanduser() if reference.endswith(".csv") else None


def read_source(path: Path, expected: str, error: type[MeshwrightError]) -> bytes:
    """The content of a Python file; raises ``error``, which says what is wrong and what was ``expected``."""
    if not path.exists() or path.is_dir():
        nearby = sorted(item.name for item in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise error(
            f"There is no file {str(path)!r}{suggest(path.name, nearby)}. Give the path of a Python file and a "
            f"function in it that {expected}."
        )
    content = read_regular(path, MAX_SOURCE_BYTES + 1, error)
    if len(content) > MAX_SOURCE_BYTES:
        raise error(f"{path}: more than {MAX_SOURCE_BYTES} bytes, so not a Python file. Check which one was meant.")
    return content


def source_hash(content: bytes) -> str:
    """Hash of a file's content: 16 hexadecimal digits of SHA-256, as for documents."""
    return hashlib.sha256(content).hexdigest()[:16]


def load_function(
    path: Path, name: str, *, expected: str, error: type[MeshwrightError], content: bytes | None = None
) -> Callable[..., Any]:
    """The callable ``name`` of the Python file at ``path``, which is run (``content``: its content, if already read).

    ``expected`` says what the function does ("returns ..."), for messages. Raises ``error``.
    """
    content = read_source(path, expected, error) if content is None else content
    module = _run_file(path, content, error)
    function = getattr(module, name, None)
    if not callable(function):
        known = [
            key for key, item in vars(module).items() if inspect.isfunction(item) and item.__module__ == module.__name__
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
    """Turn exceptions of a user's code into ``error`` with their own message and line.

    ``otherwise``: the place to name if no line of the file is in the traceback.
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
    """The place in the user's file, with the source line; the place nearest to the cause, or ``otherwise``."""
    if isinstance(problem, SyntaxError) and problem.filename:
        return f"{problem.filename}:{problem.lineno}: {(problem.text or '').strip()}"
    frames = traceback.extract_tb(problem.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    if not own:
        return otherwise or str(path)
    return source_line(path, own[-1].lineno or 0)


def first_line(function: Callable[..., Any], path: Path) -> str:
    """The first line of a function in the user's file, with the source; the file alone if it is from elsewhere."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or Path(code.co_filename).resolve() != path.resolve():
        return str(path)
    return source_line(path, code.co_firstlineno)


def source_line(path: Path, line: int) -> str:
    """``path/to/file.py:12: yield Forward(...)``."""
    return f"{path}:{line}: {linecache.getline(str(path.resolve()), line).strip()}"


def own_loss(output: Any) -> Any:
    """The loss that a model computes: its output named ``loss``, or its whole output.

    Models of transformers return it so for a batch with labels.
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
