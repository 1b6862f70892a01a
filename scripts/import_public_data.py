"""Makes the public tables that ship in src/meshwright/validation/data from a folder of their originals.

    python scripts/import_public_data.py FOLDER

FOLDER holds pipedejavu/, alpa/, kernels/ and validation/ as src/meshwright/validation/data/README.md describes them.
"""

import csv
import gzip
import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

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
# Alpa's methods on one node: what of the training states each shards (alpa, OSDI'22 artifact, benchmark suites). Its
# "zero_2" puts reduce-scatter and all-gather for the all-reduce of a step's gradients. One device shards nothing.
ALPA_METHODS = {
    "auto_sharding": "auto-sharding",
    "data_parallel": "none",
    "zero_2": "ZeRO-2 (once per step)",
    "zero_3": "ZeRO-3",
    "heuristic": "largest dimension",
}
# Optimizers that are not AdamW (benchmark_2d_one_case_moe.py, benchmark_2d_one_case_wresnet.py).
ALPA_OPTIMIZERS = {"moe": "Adafactor", "wresnet": "momentum"}


def alpa_steps(tables: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Rows of Alpa's study on one node and of its end-to-end GPT runs with a stated plan, by the columns of steps."""
    rows = [_alpa_one_node(index, row) for index, row in enumerate(tables["intra_op_ablation"])]
    return rows + [_alpa_end_to_end(row) for row in tables["e2e"] if row["model"] == "gpt" and "plan" in row]


def _alpa_one_node(index: int, row: dict[str, Any]) -> dict[str, Any]:
    # A logical mesh (data, model); the plan of an automatic run on it is not stated beyond that.
    data, model = row.get("logical_mesh", ("", ""))
    failed = row["oom_or_failed"]
    return {
        "id": f"alpa-node-{row['model']}-{row['gpus']}-{row['method']}-{index}",
        "locator": "results_intra_ablation_ref.tsv",
        "family": row["model"],
        "model": {"moe": "GShard"}.get(row["model"], ""),
        "layers": row.get("layers", row.get("depth")),
        "hidden": row.get("hidden", row.get("base_channels")),
        "heads": row.get("heads", ""),
        "vocab": row.get("vocab", ""),
        "n_experts": row.get("experts", ""),
        "seq": row.get("seq_len", ""),
        "n_devices": row["gpus"],
        "precision": "fp32" if row["model"] == "wresnet" else "fp16",
        "tp": model,
        "dp": data,
        "pp": 1,
        "zero_or_sharding": ALPA_METHODS[row["method"]] if row["gpus"] > 1 or not data else "none",
        "gbs_seq": row["batch"],
        "mbs": row["batch"] // data if data and row["batch"] % data == 0 else "",
        "n_microbatches": 1,
        "iter_time_s": "" if failed else statistics.median(row["latency_s"]),
        "peak_mem_gib": row["peak_mem_gb"] or "",
        "status": "out of memory or failed" if failed else "measured",
        "recompute": "none" if row["model"] == "wresnet" else "full",
        "notes": ALPA_OPTIMIZERS.get(row["model"], ""),
    }


def _alpa_end_to_end(row: dict[str, Any]) -> dict[str, Any]:
    plan = row["plan"]
    each = row["layers"] // plan["layers"]
    stages = [(len(stage["layers"]) * each, *stage["logical"]) for stage in plan["stages"]]
    alike = len(set(stages)) == 1
    data, model = stages[0][1:]
    return {
        "id": f"alpa-e2e-gpt-{row['model_size']}",
        "locator": "results_e2e_ref.tsv",
        "family": "gpt",
        "layers": row["layers"],
        "hidden": row["hidden"],
        "heads": row["heads"],
        "vocab": row["vocab"],
        "seq": row["seq_len"],
        "n_devices": row["hosts"] * row["gpus_per_host"],
        "precision": "fp16",
        "tp": model if alike else "",
        "dp": data if alike else "",
        "pp": len(stages),
        "zero_or_sharding": "auto-sharding",
        "gbs_seq": row["global_batch"],
        "mbs": row["global_batch"] // plan["micro_batches"] // data if alike else "",
        "n_microbatches": plan["micro_batches"],
        "iter_time_s": row["latency_s_from_tflops"],
        "iter_time_kind": "derived from achieved FLOP/s",
        "status": "measured",
        "notes": "stages (layers, data, model): " + ", ".join(map(str, stages)),
    }


def write_alpa(source: Path, columns: list[str], target: Path) -> None:
    """Alpa's rows by the columns of the other steps, with what all of them share."""
    common = {
        "source": "Alpa (OSDI 2022), artifact branch of alpa-projects/alpa, benchmark/alpa",
        "provenance": "parsed from the repository file",
        "licence": "Apache-2.0",
        "device": "V100",
        "devices_per_node": 8,
        "cluster": "AWS p3.16xlarge: 8 x V100 16 GB, NVLink; 25 Gb/s inter-node",
        "framework": "Alpa",
        "recompute": "full",
        "schedule": "1F1B",
        "iter_time_kind": "measured",
    }
    with target.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for row in alpa_steps(json.loads(source.read_text(encoding="utf-8"))):
            writer.writerow({**common, **row})


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
    columns = (folder / "validation/training_steps.csv").read_text(encoding="utf-8").splitlines()[0].split(",")
    write_alpa(folder / "alpa/alpa_osdi22_measured.json", columns, TARGET / "training_steps_alpa.csv")
    for name in SMALL:
        shutil.copyfile(folder / f"validation/{name}.csv", TARGET / f"{name}.csv")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
