"""Measures peaks of memory again: the cases of ``memory_training.csv``, ``memory_pipelines.csv``,
``memory_recompute.csv`` and ``memory_sharing.csv`` in validation/data.

    .venv/bin/python scripts/measure_memory.py [training | pipelines | recompute | sharing]

Every case of training runs in its own process, every pipeline in one process per rank (gloo). Add a case by writing its
first columns. Peaks depend on the versions of torch and its libraries, not on the load.
"""

from __future__ import annotations

import csv
import os
import socket
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from running.peak_memory import MemoryCase, measure_peak, measure_rank_peak

from meshwright.validation.memory_sets import PIPELINE_COLUMNS, RECOMPUTE_COLUMNS, SHARING_COLUMNS, pipeline_plan

DATA = Path(__file__).parent.parent / "src/meshwright/validation/data"
TRAINING_COLUMNS = ("model", "batch_size", "optimizer", "recompute")
RANK_COLUMNS = {"pipelines": PIPELINE_COLUMNS, "recompute": RECOMPUTE_COLUMNS, "sharing": SHARING_COLUMNS}
TIMEOUT_S = 600


def measure_training():
    """Rewrite the peaks of whole models."""
    found = []
    for case in read_cases("memory_training", TRAINING_COLUMNS):
        done = run(["training", *case], {})
        print(*case, done, flush=True)
        found.append((*case, *done.split()))
    write_rows("memory_training", (*TRAINING_COLUMNS, "peak_bytes", "resident_bytes"), found)


def measure_ranks(what):
    """Rewrite the peaks of ranks of plans."""
    found, columns = [], RANK_COLUMNS[what]
    for case in dict.fromkeys(read_cases(f"memory_{what}", columns)):
        size = pipeline_plan(dict(zip(columns, case, strict=True))).num_ranks
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        group = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
        ranks = [start([what, *case], {**group, "RANK": str(rank)}) for rank in range(size)]
        for rank, process in enumerate(ranks):
            text, _ = process.communicate(timeout=TIMEOUT_S)
            print(*case, rank, text.strip(), flush=True)
            found.append((*case, rank, int(text)))
    write_rows(f"memory_{what}", (*columns, "rank", "peak_bytes"), found)


def read_cases(name, columns):
    """The cases of a file of truths."""
    with (DATA / f"{name}.csv").open(encoding="utf-8", newline="") as stream:
        return [tuple(row[column] for column in columns) for row in csv.DictReader(stream)]


def write_rows(name, columns, rows):
    """Write a file of truths, with versions and date."""
    made = (torch.__version__, datetime.now(UTC).date().isoformat())
    table = [(*columns, "torch", "date"), *((*row, *made) for row in rows)]
    with (DATA / f"{name}.csv").open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream, lineterminator="\n").writerows(table)


def start(arguments, environment):
    """This script as a process of its own."""
    command = [sys.executable, __file__, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=os.environ | environment)


def run(arguments, environment):
    """What such a process prints."""
    process = start(arguments, environment)
    text, _ = process.communicate(timeout=TIMEOUT_S)
    return text.strip()


def measure_one(what, case):
    """One case, in this process."""
    if what in RANK_COLUMNS:
        print(measure_rank_peak(pipeline_plan(dict(zip(RANK_COLUMNS[what], case, strict=True)))))
        return
    model, batch_size, optimizer, recompute = case
    found = measure_peak(MemoryCase(model=model, batch_size=int(batch_size), optimizer=optimizer, recompute=recompute))
    print(found.peak_bytes, found.resident_bytes)


if __name__ == "__main__":
    chosen, *rest = sys.argv[1:] or [""]
    if rest:
        measure_one(chosen, rest)
    else:
        if chosen in ("", "training"):
            measure_training()
        for name in RANK_COLUMNS:
            if chosen in ("", name):
                measure_ranks(name)
