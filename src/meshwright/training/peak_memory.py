"""Peak memory of a rank in training: measured (`MemoryMeter`), and predicted for a rank that ran out of memory.

The measurement starts when the model is prepared. On a CUDA device it is the peak of torch's allocator. On a CPU under
Linux it is the growth of the process's resident set (its high-water mark is reset first) plus the size of the stage's
parameters. So the interpreter, its libraries and the memory of the capture are left out. Memory that the C library kept
from these for reuse is not counted, so the figure can be somewhat low.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from meshwright.cost import CostModel
from meshwright.runtime import ProcessPeak
from meshwright.simulator import form_teams, simulate_plan
from meshwright.spec import MeshwrightError, Plan, format_bytes, format_count, load_cluster
from meshwright.spec.plan_files import read_plan
from meshwright.training.job import capture_fake

_HELP = (
    "To use less memory, plan with smaller microbatches (-m), --recompute op or full, --zero 1 to 3, more stages, or "
    "fewer ranks on a host; `meshwright show PLAN` shows what the memory is used for."
)

_HELP_UNDER_POLICIES = "To use less memory, plan with a smaller --batch, fewer ranks on a host, or without --exchange."


def predict_memory(plan_file: str, process: int) -> str:
    """Return a text for the user: the predicted peak memory of a process (or why it is not known), and remedies."""
    try:
        known = _predict(plan_file, process)
    except (MeshwrightError, OSError) as error:
        known = f"Its memory cannot be predicted here: {error}"
    plan = read_plan(plan_file)
    has_policy = isinstance(plan, Plan) and plan.exchange.policy
    return f"{known} {_HELP_UNDER_POLICIES if has_policy else _HELP}".strip()


def _predict(plan_file: str, process: int) -> str:
    plan = read_plan(plan_file)
    if not isinstance(plan, Plan):
        return ""
    width = plan.sharding.width
    cluster = load_cluster(plan.cluster)
    cost = CostModel(cluster=cluster, precision=plan.workload.precision)
    _, captured = capture_fake(plan)
    local, graph, devices, costs = form_teams(plan, captured.graph, cluster, cost)
    peaks = simulate_plan(local, graph, devices, cost=costs).peak_memory_bytes
    has = cluster.device_kind(process).memory_bytes
    together = ""
    if cluster.device_kind(process).name == "cpu" and plan.num_devices > 1:
        total = sum(peaks) * width
        together = f"; all {format_count(plan.num_devices, 'rank')} together, {format_bytes(total)}"
    return (
        f"It was predicted to use {format_bytes(peaks[process // width])} of {format_bytes(has)}{together}, without "
        "the interpreter and its libraries."
    )


_STATUS = Path("/proc/self/status")
# Writing 5 here resets the high-water mark of the resident set (Linux, proc(5), clear_refs).
_CLEAR_REFS = Path("/proc/self/clear_refs")


class MemoryMeter:
    """Measures the peak memory of this process from its creation on.

    ``resident``: existing tensors that count as well, such as parameters. ``beside()``: bytes of offloaded tensors,
    which are subtracted from the growth of the process on CPUs.
    """

    def __init__(
        self, device: torch.device, resident: Iterable[torch.Tensor], beside: Callable[[], int] = lambda: 0
    ) -> None:
        self._device = device
        self._resident_bytes = sum(tensor.numel() * tensor.element_size() for tensor in resident)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with contextlib.suppress(OSError):
                _CLEAR_REFS.write_text("5")
        self._start_bytes, self._beside = _read_status("VmRSS"), beside
        self._beside_bytes = beside()

    def peak(self) -> ProcessPeak:
        """Return the peak so far in bytes; 0 if the platform does not report it."""
        if self._device.type == "cuda":
            in_use, reserved = (
                read(self._device) for read in (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)
            )
            return ProcessPeak(in_use, reserved)
        peak = _read_status("VmHWM")
        peak -= min(self._beside() - self._beside_bytes, peak)
        return ProcessPeak(max(peak - self._start_bytes, 0) + self._resident_bytes if peak else 0, 0)


def _read_status(field: str) -> int:
    """A size of this process in bytes; 0 if the platform has no such file."""
    try:
        match = re.search(rf"^{field}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0
