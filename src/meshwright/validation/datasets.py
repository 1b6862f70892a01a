"""The public measurements that ship with Meshwright, as rows; their sources and licences stand in ``data/README.md``.

Tables of kernels and collectives are measurement tables (parquet, `meshwright.records`), made from the originals by
``scripts/import_public_data.py``; step times keep the columns of their source.
"""

from __future__ import annotations

import csv
import gzip
import io
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.records.parquet import read_records
from meshwright.spec import DocumentError, suggest
from meshwright.spec.files import read_regular

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from meshwright.records import Records

# A row of a table of steps: its columns by name, empty where the source says nothing.
StepRow = dict[str, str]
# The largest that ships unpacks to 300 kB.
_MAX_BYTES = 64 * 2**20


def load_records(name: str) -> Records:
    """A shipped measurement table: ``v100``, ``kernels``, ``nccl``, ... Raises DocumentError for another name."""
    with resources.as_file(_find(f"{name}.parquet")) as path:
        return read_records(path)


def load_table(name: str) -> list[StepRow]:
    """A shipped table (CSV) as rows. Raises DocumentError for another name."""
    with resources.as_file(_find(f"{name}.csv", f"{name}.csv.gz")) as path:
        return read_table(path)


def load_steps(*, single_node: bool = False) -> list[StepRow]:
    """Measured training steps of 278 setups, or with ``single_node`` vTrain's 736 on one node of A100s."""
    return load_table("training_steps_single_node_vtrain" if single_node else "training_steps")


def read_table(path: Path | str) -> list[StepRow]:
    """The rows of a CSV file, which may be compressed. Raises DocumentError for rows of other lengths than the first."""
    path = Path(path)
    content = read_regular(path, _MAX_BYTES + 1)
    try:
        if content.startswith(b"\x1f\x8b"):
            with gzip.open(io.BytesIO(content)) as unpacked:
                content = unpacked.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise DocumentError(f"{path}: more than {_MAX_BYTES} bytes, to which tables are limited. Split it.")
        reader = csv.reader(io.StringIO(content.decode("utf-8-sig")), strict=True)
        names, *rows = reader
        if len(set(names)) < len(names):
            raise ValueError("a column twice")
        return [dict(zip(names, row, strict=True)) for row in rows if row]
    except (csv.Error, ValueError, EOFError, OSError) as error:
        raise DocumentError(f"{path}: not a table in CSV ({error}). Check which file was meant.") from None


def _find(*names: str) -> Traversable:
    folder = resources.files("meshwright.validation") / "data"
    for name in names:
        if (folder / name).is_file():
            return folder / name
    known = [item.name.split(".")[0] for item in folder.iterdir() if not item.name.endswith(".md")]
    wanted = names[0].split(".")[0]
    raise DocumentError(f"No public measurements {wanted!r} are shipped{suggest(wanted, known)}.")
