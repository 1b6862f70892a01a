"""Makes src/meshwright/validation/data/cpu_ops.parquet from tables of one model each, FOLDER/MODEL.json.

    meshwright measure MODEL --ranks 1 --repeats 10 -m 1 -m 2 [-m 4] --out FOLDER/MODEL.json
    python scripts/gather_cpu_ops.py FOLDER

A row's source begins with the model's name and a colon; `validation/cpu_ops.py` reads it.
"""

import sys
from dataclasses import replace
from pathlib import Path

from meshwright.records import COLUMNS, Records, concat_records, from_measurements, make_records
from meshwright.records.parquet import write_records
from meshwright.spec import Measurements, read_document

TARGET = Path(__file__).resolve().parents[1] / "src/meshwright/validation/data/cpu_ops.parquet"


def op_rows(path: Path) -> Records:
    """The ops of one model's table, without its optimizers and transfers."""
    table = read_document(Measurements, path)
    rows = from_measurements(replace(table, optimizers=(), transfers=(), overhead_s=0.0))
    columns = {name: getattr(rows, name) for name in COLUMNS}
    return make_records(**{**columns, "source": f"{path.stem}: {table.conditions}"})


def main(folder: Path) -> None:
    parts = [op_rows(path) for path in sorted(folder.glob("*.json"))]
    path = write_records(concat_records(parts), TARGET)
    print(f"{path.name}: {sum(map(len, parts))} rows of {len(parts)} models, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
