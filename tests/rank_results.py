"""Workers of distributed tests that find something together, in float64; rank 0 writes it, the test reads it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.processes import fork_ranks, run_ranks


def write_results(find: Callable[[Path], Any]) -> None:
    """``python -m worker WORLD_SIZE OUT``: every rank calls ``find(folder of OUT)``, rank 0 writes what it returns."""
    world_size, out = sys.argv[1:]
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)

    def run() -> None:
        dist.init_process_group("gloo")
        found = find(Path(out).parent)
        if dist.get_rank() == 0:
            Path(out).write_text(json.dumps(found))
        dist.barrier()
        dist.destroy_process_group()

    fork_ranks(int(world_size), run)


def read_results(worker: str, world_size: int, folder: Path, *, timeout_s: float = 300) -> Any:
    """What a module's ranks found, with ``folder`` to work in."""
    run_ranks(worker, world_size, str(folder / "out.json"), timeout_s=timeout_s)
    return json.loads((folder / "out.json").read_text())
