"""Measures the peak memory of the cases of ``validation/data/memory_training.csv`` again, each in its own process.

    .venv/bin/python scripts/measure_memory.py

Add a case by writing its first four columns. Peaks depend on the versions of torch and its libraries, not on the load.
"""

from __future__ import annotations

import csv
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

from meshwright.training.peak_memory import MemoryCase, measure_peak

TRUTHS = Path(__file__).parent.parent / "src/meshwright/validation/data/memory_training.csv"
COLUMNS = ("model", "batch_size", "optimizer", "recompute", "peak_bytes", "resident_bytes", "torch", "date")
TIMEOUT_S = 600


def measure_all():
    """Rewrite the file."""
    with TRUTHS.open(encoding="utf-8", newline="") as stream:
        cases = [tuple(row[name] for name in COLUMNS[:4]) for row in csv.DictReader(stream)]
    rows = []
    for case in cases:
        command = [sys.executable, __file__, *case]
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=TIMEOUT_S, check=True)
        print(*case, done.stdout.strip(), flush=True)
        rows.append((*case, *done.stdout.split(), torch.__version__, datetime.now(UTC).date().isoformat()))
    with TRUTHS.open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream, lineterminator="\n").writerows([COLUMNS, *rows])


if __name__ == "__main__":
    if len(sys.argv) == 1:
        measure_all()
    else:
        model, batch_size, optimizer, recompute = sys.argv[1:]
        found = measure_peak(
            MemoryCase(model=model, batch_size=int(batch_size), optimizer=optimizer, recompute=recompute)
        )
        print(found.peak_bytes, found.resident_bytes)
