"""Choose the devices on which the ranks of a plan compute: CUDA GPUs or CPUs."""

from __future__ import annotations

import os

import torch

from meshwright.cost.memory import Backend, backend_of
from meshwright.spec import MeshwrightError, Placement, Plan, PlanError, RunError, load_cluster


def choose_device(plan: Plan | Placement, chosen: Backend | None = None) -> Backend:
    """Return the type of device, ``cpu`` or ``cuda``: the ``chosen`` one, or by default that of the plan's cluster.

    If the plan's cluster file is not found here, the default is CUDA if torch sees a GPU, else the CPU. Raises
    PlanError for another ``chosen`` device, or for CUDA without a GPU.
    """
    if chosen not in (None, "cpu", "cuda"):
        raise PlanError(f"Device {chosen!r} was given; expected cpu or cuda.")
    planned = _planned_kinds(plan)
    if chosen is None:
        chosen = "cuda" if any(planned.values()) or (not planned and torch.cuda.is_available()) else "cpu"
    if chosen == "cuda" and not torch.cuda.is_available():
        names = " and ".join(name for name, has_cuda in planned.items() if has_cuda)
        found = torch.accelerator.current_accelerator()
        other = f"; its accelerator here, {found.type!r}, is not supported" if found is not None else ""
        raise PlanError(
            f"The plan is for {names or 'CUDA devices'}, but torch sees no CUDA device here{other}. Run it on the "
            "cluster, with a build of torch for CUDA (`meshwright doctor` checks both), or try it on CPUs: "
            '--device cpu, in Python device="cpu".'
        )
    return chosen


def own_device(kind: Backend) -> torch.device:
    """Return the device of this process: the CPU, or the GPU with the number LOCAL_RANK.

    Raises RunError if the host has fewer GPUs than ranks.
    """
    if kind == "cpu":
        return torch.device("cpu")
    local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= count:
        ranks = os.environ.get("LOCAL_WORLD_SIZE", str(local_rank + 1))
        raise RunError(
            f"{ranks} ranks were started on this host, but torch sees {count} GPUs; each rank needs its own GPU. "
            "Start at most one rank per GPU of the host (CUDA_VISIBLE_DEVICES may hide GPUs), or plan for fewer "
            "devices per node."
        )
    return torch.device("cuda", local_rank)


def _planned_kinds(plan: Plan | Placement) -> dict[str, bool]:
    """The names of the kinds of devices that the plan was made for, and whether they use CUDA's libraries."""
    try:
        cluster = load_cluster(plan.cluster)
    except (MeshwrightError, OSError):
        return {}
    return {kind.usual_name: backend_of(kind) == "cuda" for kind in cluster.device_kinds}
