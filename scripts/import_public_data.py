"""Makes the public tables that ship in src/meshwright/validation/data from a folder of their originals.

    python scripts/import_public_data.py FOLDER

FOLDER holds pipedejavu/, kernels/ and validation/ as src/meshwright/validation/data/README.md describes them.
"""

import gzip
import shutil
import sys
from pathlib import Path

from meshwright.records import concat_records, make_records
from meshwright.records.importing import import_file
from meshwright.records.parquet import write_records
from meshwright.records.table import COLUMNS

TARGET = Path(__file__).resolve().parents[1] / "src/meshwright/validation/data"

TABLES = {
    "v100": ["pipedejavu/prof_database.pkl"],
    "kernels": [
        "kernels/gemm_perf.parquet",
        "kernels/context_attention_perf.parquet",
        "kernels/generation_attention_perf.parquet",
    ],
    "nccl": [
        "validation/collectives_nccl_aiconfigurator.csv",
        "validation/collectives_nccl_allreduce_vtrain.csv",
    ],
}
# What the file of Alpa's database does not say of itself.
SOURCES = {"v100": "Alpa, prof_database_osdi22_artifact.pkl (8 x V100 16 GB per host, NVLink, 25 Gbit/s)"}
STEPS = {"training_steps": False, "training_steps_single_node_vtrain": True}
SMALL = (
    "activation_memory_korthikanti_fig7",
    "layer_times_korthikanti",
    "zero_bubble_rates_table5",
)


def main(folder: Path) -> None:
    for name, files in TABLES.items():
        parts = [import_file(folder / file, device="V100") for file in files]
        records = concat_records(part.records for part in parts)
        if name in SOURCES:
            columns = {column: getattr(records, column) for column in COLUMNS}
            records = make_records(**{**columns, "source": SOURCES[name]})
        path = write_records(records, TARGET / f"{name}.parquet")
        left_out = {reason: count for part in parts for reason, count in part.left_out.items() if count}
        print(f"{path.name}: {len(records)} rows, {path.stat().st_size} bytes; left out: {left_out or 'none'}")
    for name, compressed in STEPS.items():
        content = (folder / f"validation/{name}.csv").read_bytes()
        if compressed:
            (TARGET / f"{name}.csv.gz").write_bytes(gzip.compress(content, mtime=0))
        else:
            (TARGET / f"{name}.csv").write_bytes(content)
    for name in SMALL:
        shutil.copyfile(folder / f"validation/{name}.csv", TARGET / f"{name}.csv")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
