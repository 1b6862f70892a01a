"""Makes the public tables that ship in src/meshwright/validation/data from a folder of their originals.

    python scripts/import_public_data.py FOLDER

FOLDER holds pipedejavu/, alpa/, kernels/ and validation/ as src/meshwright/validation/data/README.md describes them.
"""

import csv
import gzip
import io
import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

from meshwright.records import COLUMNS, concat_records, import_file, make_records
from meshwright.records.parquet import write_records

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


# When the runs of a source were measured, by a part of its name: its paper, the file's date, or the release.
DATES = {
    "2104.04473": "2021",
    "2205.05198": "2022",
    "2401.10241": "2023",
    "202412": "2024-12",
    "2025-06": "2025-06",
    "202506": "2025-06",
    "llm-foundry": "2023",
    "vTrain": "2022",
    "SimuMax": "2025",
    "Alpa": "2022",
}
# Words of notes and locators that say what software did, and how it is stated.
FEATURES = {"asynctp": "async tensor parallel", "adafactor": "Adafactor", "momentum": "momentum", "_cef": "fused loss"}
# Chunks per device of SC'21's interleaved runs, which its table leaves out: layers and stages of the model, and
# layers per stage over --num-layers-per-virtual-pipeline-stage of NVIDIA/Megatron-LM, examples/sc21 (run_table_1.sh; 96
# layers: run_figure_12.sh). The table says "interleaved" of two models that the script runs without: fewest chunks.
SC21_CHUNKS = {("60", "4"): 3, ("80", "8"): 2, ("96", "16"): 2, ("105", "35"): 3, ("96", "12"): 4}
# What the parameters of Zero Bubble's models leave for words (27 to 35 thousand: 6.2, 14.6 and 28.3 B of Table 3 less
# their layers); its example takes a SentencePiece tokenizer and unties embedding and head
# (sail-sg/zero-bubble-pipeline-parallelism, examples/pretrain_zero_bubble.sh).
ZERO_BUBBLE = {"vocab": "32000", "features": "untied"}


def complete_steps(row: dict[str, str]) -> dict[str, str]:
    """A row of steps with the columns ``date`` and ``features``, and with what its source states elsewhere."""
    source, said = row["source"], (row["notes"] + row["locator"]).lower().replace(" ", "")
    date = next((date for part, date in DATES.items() if part in source), "")
    features = [feature for word, feature in FEATURES.items() if word in said]
    features += ["no dropout"] if source.startswith("Alpa") else []
    features += ["fused loss"] if "202506" in source else []
    row = {**row, "date": date, "features": "; ".join(features)}
    if "2104.04473" in source and row["schedule"].lower().startswith("interleaved") and not row["vpp"]:
        row["vpp"] = str(SC21_CHUNKS.get((row["layers"], row["pp"]), min(int(row["pp"]), 2)))
    if "2401.10241" in source:
        row.update(ZERO_BUBBLE)
    if "torchtitan" in source and row["pp"] not in ("", "1") and not row["n_microbatches"]:
        row["mbs"] = ""  # the batch of a rank in a step, which its pipeline schedules cut up
    if row["model"] == "MPT-70b":
        row["layers"] = "80"  # mosaicml/llm-foundry, scripts/train/yamls/pretrain/mpt-70b.yaml; its parameters say so
    return row


def complete_table(text: str) -> str:
    """A table of steps with every row completed."""
    reader = csv.DictReader(io.StringIO(text))
    columns = [*dict.fromkeys([*(reader.fieldnames or ()), "date", "features"])]
    target = io.StringIO()
    writer = csv.DictWriter(target, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(complete_steps(row) for row in reader)
    return target.getvalue()


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
    table = io.StringIO()
    writer = csv.DictWriter(table, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({**common, **row} for row in alpa_steps(json.loads(source.read_text(encoding="utf-8"))))
    target.write_text(complete_table(table.getvalue()), encoding="utf-8")


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
        content = complete_table((folder / f"validation/{name}.csv").read_text(encoding="utf-8")).encode()
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
