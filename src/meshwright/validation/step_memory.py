"""Which measured steps are said not to fit: runs that ran out of memory should be, runs that were timed should not.

A row is refused if `cost.memory.predict_device_peak` is above the memory that its device states. Parameters are sharded
with ZeRO-3 alone; a fused loss keeps one copy of the logits. Software may take less than all of the memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.cost.memory import predict_device_peak
from meshwright.cost.transformer import TransformerError
from meshwright.validation.step_cells import CellError
from meshwright.validation.step_rows import read_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.cost.memory.frameworks import Framework
    from meshwright.validation.datasets import StepRow

_GIB = 2**30
_OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryVerdicts:
    """Ids of rows: ran out of memory and refused, and not refused; timed and refused; and how many were timed."""

    refused: tuple[str, ...]
    missed: tuple[str, ...]
    wrongly_refused: tuple[str, ...]
    num_timed: int

    def __str__(self) -> str:
        failed = len(self.refused) + len(self.missed)
        said = (
            f"{len(self.refused)} of {failed} runs that ran out of memory are refused, and "
            f"{len(self.wrongly_refused)} of {self.num_timed} that were timed"
        )
        return said + (f" ({', '.join(self.wrongly_refused)})" if self.wrongly_refused else "")


def judge_memory(rows: Sequence[StepRow]) -> MemoryVerdicts:
    """The verdicts on all rows that say enough; a run that failed is one whose status names memory."""
    found: dict[tuple[bool, bool], list[str]] = {
        (failed, over): [] for failed in (True, False) for over in (True, False)
    }
    for row in rows:
        failed = _OUT_OF_MEMORY in row.get("status", "")
        if not (failed or row.get("iter_time_s")):
            continue
        try:
            found[failed, needed_share(row) > 1.0].append(row["id"])
        except (CellError, TransformerError):
            continue
    return MemoryVerdicts(
        refused=tuple(found[True, True]),
        missed=tuple(found[True, False]),
        wrongly_refused=tuple(found[False, True]),
        num_timed=len(found[False, True]) + len(found[False, False]),
    )


def needed_share(row: StepRow) -> float:
    """The predicted peak over what the row's software takes of its device. Raises as `read_step`."""
    case = read_step({**row, "iter_time_s": "", "status": ""})
    fused = case.software.fused_loss or "cef" in row["locator"] or "202506" in row["source"]
    framework: Framework = "fsdp2" if case.setup.zero == 3 else "megatron"
    if case.software.name.startswith("Alpa"):
        framework = "alpa"
    states = case.software.state_bytes
    peak = predict_device_peak(case.transformer, case.setup, framework, fused_loss=fused, state_bytes=states)
    stated = re.search(r"-([0-9]+)GB", row["device"])
    available = case.software.memory_share * (int(stated[1]) * _GIB if stated else case.kind.memory_bytes)
    return max(peak.reserved_bytes, peak.allocated_bytes) / available
