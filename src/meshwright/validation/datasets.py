"""The public measurements that ship with Meshwright, as rows; their sources and licences are in ``data/README.md``.

Tables of kernels and collectives are measurement tables (parquet, `meshwright.records`), made from the originals by
``scripts/import_public_data.py``; step times keep the columns of their source.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.records.text_files import number_rows, parse_csv, read_unpacked
from meshwright.spec import DocumentError, Graph, decode_document, load_shipped_graph, shipped_graphs, suggest
from meshwright.spec.parsing import parse_data
from meshwright.spec.shipped import SUFFIX, unpack

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from meshwright.records import Records

# A row of a table of steps: its columns by name, empty if the source states nothing.
StepRow = dict[str, str]


def load_records(name: str) -> Records:
    """A shipped measurement table: ``v100``, ``kernels``, ``nccl``, ... Raises DocumentError for another name."""
    from meshwright.records.parquet import read_records  # noqa: PLC0415  (pyarrow: steps and lists need none)

    with resources.as_file(_find(f"{name}.parquet")) as path:
        return read_records(path)


def load_table(name: str) -> list[StepRow]:
    """A shipped table (CSV) as rows. Raises DocumentError for another name."""
    with resources.as_file(_find(f"{name}.csv", f"{name}.csv.gz")) as path:
        return read_table(path)


def load_graph(name: str) -> Graph:
    """The graph of a measured model: one of the shipped ones, or of those next to the tables. DocumentError if none."""
    if name in shipped_graphs():
        return load_shipped_graph(name)
    source = _find(f"{name}{SUFFIX}")
    return decode_document(Graph, parse_data(unpack(source.read_bytes(), source.name), Path(source.name)), source.name)


def load_steps(*, single_node: bool = False) -> list[StepRow]:
    """Measured training steps of 278 setups, or with ``single_node`` vTrain's 736 on one node of A100s."""
    return load_table("training_steps_single_node_vtrain" if single_node else "training_steps")


def load_all_steps() -> list[StepRow]:
    """Every measured training step that ships: those of `load_steps`, and Alpa's on V100."""
    return [*load_steps(), *load_steps(single_node=True), *load_table("training_steps_alpa")]


def read_table(path: Path | str) -> list[StepRow]:
    """The rows of a CSV file, which may be compressed. Raises DocumentError for any other file."""
    path = Path(path)
    return parse_csv(read_unpacked(path), path)


def read_lines(path: Path | str) -> list[tuple[int, StepRow]]:
    """The same as `read_table`, each row with the line on which it starts."""
    path = Path(path)
    return number_rows(read_unpacked(path), path)


def _find(*names: str) -> Traversable:
    folder = resources.files("meshwright.validation") / "data"
    for name in names:
        if (folder / name).is_file():
            return folder / name
    known = [item.name.split(".")[0] for item in folder.iterdir() if not item.name.endswith(".md")]
    wanted = names[0].split(".")[0]
    raise DocumentError(f"No public measurements {wanted!r} are shipped{suggest(wanted, known)}.")
