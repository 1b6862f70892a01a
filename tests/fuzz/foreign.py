"""Sound files of other tools, small ones of every kind that `measure --from` and `validate --steps` read."""

from __future__ import annotations

import io
import json
import sys
import types
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from meshwright.records.parquet import write_records
from meshwright.validation import load_steps
from tests.records.test_alpa import MeshProfilingResult
from tests.records.test_importing import GEMM, NCCL, PROFILE, parquet, table_csv
from tests.records.test_table import some_records
from tests.records.test_trace import FLOATS, kernel, op

TABLE_LINES = (
    "measure --from {} --device V100 --out table.parquet",
    "measure --from {} --out table.parquet --json",
)
RECORD_LINES = (
    *TABLE_LINES,
    "show {}",
    "show {} --json",
    "plan graph.json --cluster 2xH100 --batch 4 --top 1 --measurements {}",
)
STEP_LINES = ("validate --steps {}", "validate --steps {} --json")


@cache
def foreign_files() -> dict[str, tuple[bytes, tuple[str, ...]]]:
    """Name → (content, lines that read it)."""
    steps = [row for row in load_steps() if row["id"].startswith("korth-t5")][:2]
    table = io.StringIO()
    for row in (list(steps[0]), *(list(row.values()) for row in steps)):
        print(",".join(json.dumps(cell) if "," in cell else cell for cell in row), file=table)
    with TemporaryDirectory() as made:
        folder = Path(made)
        gemm = parquet(folder / "gemm.parquet", GEMM).read_bytes()
        records = write_records(some_records(), folder / "records.parquet").read_bytes()
        nccl = table_csv(folder / "nccl.csv", NCCL).read_bytes()
    events = [
        op("aten::linear", 0, 100, [[4, 8], [16, 8]], FLOATS, launch=1),
        op("aten::addmm", 20, 70, [[16], [4, 8], [8, 16]], ("float", *FLOATS), launch=2),
        kernel("gemm<1>(int)", 5, 2),
    ]
    trace = {"traceEvents": events, "deviceProperties": [{"name": "NVIDIA H100"}], "baseTimeNanoseconds": 10**18}
    results = "intra\tp3.16\t1\t2\tgpt\tzero_3\t{'param_count': 0.76, 'latencies': [0.5, 0.4]}\t1639058687\n"
    return {
        "graph.txt": (PROFILE.encode(), TABLE_LINES),
        "results.tsv": (results.encode(), TABLE_LINES),
        "nccl.csv": (nccl, TABLE_LINES),
        "gemm.parquet": (gemm, TABLE_LINES),
        "table.pkl": (_database(), TABLE_LINES),
        "trace.json": (json.dumps(trace).encode(), TABLE_LINES),
        "records.parquet": (records, RECORD_LINES),
        "steps.csv": (table.getvalue().encode(), STEP_LINES),
    }


def _database() -> bytes:
    """A pickle of Alpa's kind; its module is there only while it is written."""
    import pickle

    result = MeshProfilingResult()
    result.all_reduce_cost_dict = {(((0, 1), (2, 3)), "f16"): [(0, 1e-6), (1, 2e-6), (2, 3e-6)]}
    result.dot_cost_dict = {((), "f32"): [(0, 1e-6), (2 * 128**3, 3e-5)]}
    module = types.ModuleType("alpa.mesh_profiling")
    module.MeshProfilingResult = MeshProfilingResult
    with mock.patch.dict(sys.modules, {"alpa": types.ModuleType("alpa"), "alpa.mesh_profiling": module}):
        return pickle.dumps({("default", (1, 4)): result}, protocol=3)
