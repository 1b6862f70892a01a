"""Load the public measurements that ship with Meshwright; ``data/README.md`` lists their sources and licences.

Tables of kernels and collectives are measurement tables (parquet, `meshwright.records`), which
``scripts/import_public_data.py`` makes from the originals. Tables of training steps are CSV files.
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
    """Return a shipped measurement table by its name: ``v100``, ``kernels``, ``nccl``, ...

    Raises DocumentError for an unknown name.
    """
    from meshwright.records.parquet import read_records  # noqa: PLC0415  (pyarrow: steps and lists need none)

    with resources.as_file(_find(f"{name}.parquet")) as path:
        return read_records(path)


def load_table(name: str) -> list[StepRow]:
    """Return a shipped CSV table as rows, text by column. Raises DocumentError for an unknown name."""
    with resources.as_file(_find(f"{name}.csv", f"{name}.csv.gz")) as path:
        return read_table(path)


def load_graph(name: str) -> Graph:
    """Return the graph of a measured model: a shipped graph, or one in the folder of the measurements.

    Raises DocumentError for an unknown name.
    """
    if name in shipped_graphs():
        return load_shipped_graph(name)
    source = _find(f"{name}{SUFFIX}")
    return decode_document(Graph, parse_data(unpack(source.read_bytes(), source.name), Path(source.name)), source.name)


def load_steps(*, single_node: bool = False) -> list[StepRow]:
    """Return measured training steps of 278 setups; with ``single_node``, vTrain's 736 setups on one node of A100s."""
    return load_table("training_steps_single_node_vtrain" if single_node else "training_steps")


def load_all_steps() -> list[StepRow]:
    """Return all shipped training steps: both tables of `load_steps`, and Alpa's steps on V100."""
    return [*load_steps(), *load_steps(single_node=True), *load_table("training_steps_alpa")]


def read_table(path: Path | str) -> list[StepRow]:
    """Return the rows of a CSV file, which may be compressed. Raises DocumentError for any other file."""
    path = Path(path)
    return parse_csv(read_unpacked(path), path)


def read_lines(path: Path | str) -> list[tuple[int, StepRow]]:
    """Return the rows of a CSV file as `read_table` does, each with the number of the line on which it starts."""
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
