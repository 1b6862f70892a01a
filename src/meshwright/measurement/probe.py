"""Facts of torch on this machine, as JSON lines: ``python -m meshwright.measurement.probe RANK ADDRESS:PORT ...``.

Two processes are started, with ranks 0 and 1; the first prints. They meet at each address over a TCP store, and gloo
adds 1 and 2. Lines: ``{"build": ...}``, ``{"pair": ADDRESS, "error": ...}``, ``{"device": ...}``. `meshwright.host`
reads them; it loads no torch and survives any failure here.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_MEETING_TIMEOUT = timedelta(seconds=10)


def probe(rank: int, meetings: list[str]) -> None:
    """Print the build, meet at every address, print the devices."""
    if rank == 0:
        _print({"build": _describe_build()})
    if dist.is_available() and dist.is_gloo_available():
        for meeting in meetings:
            row = {"pair": meeting.rpartition(":")[0], **_meet(rank, meeting)}
            if rank == 0:
                _print(row)
    if rank == 0:
        for device in _describe_devices():
            _print(device)


def _meet(rank: int, meeting: str) -> dict[str, Any]:
    try:
        dist.init_process_group(
            "gloo", init_method=f"tcp://{meeting}", rank=rank, world_size=2, timeout=_MEETING_TIMEOUT
        )
        total = torch.tensor([1.0 + rank])
        dist.all_reduce(total)
        dist.destroy_process_group()
    except Exception as error:  # any error is the answer
        return {"error": str(error).strip().partition("\n")[0] or type(error).__name__}
    return {} if total.item() == 3.0 else {"error": f"1 + 2 gave {total.item():g}"}


def _describe_build() -> dict[str, Any]:
    nccl = None
    if torch.version.cuda and dist.is_available() and dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl}


def _describe_devices() -> list[dict[str, Any]]:
    """One line per CUDA device, or the reason why none is usable although torch was built for CUDA."""
    if not torch.version.cuda:
        return []
    try:
        torch.cuda.init()
        properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    except Exception as error:  # a missing or old driver raises several kinds
        reason = str(error).strip().partition("\n")[0]
        return [{"build": {**_describe_build(), "cuda_error": reason}}]
    return [
        {
            "device": {
                "name": item.name,
                "memory_bytes": item.total_memory,
                "capability": [item.major, item.minor],
                "uuid": str(getattr(item, "uuid", "")),
            }
        }
        for item in properties
    ]


def _print(row: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    probe(int(sys.argv[1]), sys.argv[2:])
