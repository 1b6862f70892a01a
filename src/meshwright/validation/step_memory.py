"""Predictions of which measured steps do not fit: correct for runs that ran out of memory, wrong for timed runs.

A row is refused if what `planner.evaluate_plan` says is reserved on its fullest device is above what plans may reserve
(`cost.memory.MemoryLimit`) of the memory that its device states. Software may take less than all of the memory. Rows
that no plan expresses (`step_plans`) are not judged.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from meshwright.cost.memory import MemoryLimit
from meshwright.templates.shapes import TransformerError
from meshwright.validation.step_cells import CellError
from meshwright.validation.step_plans import StepPrediction, evaluate_steps
from meshwright.validation.step_rows import read_step

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshwright.validation.datasets import StepRow
    from meshwright.validation.step_plans import Found
    from meshwright.validation.step_rows import StepCase

_GIB = 2**30
_OUT_OF_MEMORY = "out of memory"
_MAX_NAMED = 4


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
        named = [*self.wrongly_refused[:_MAX_NAMED], *(["..."] if len(self.wrongly_refused) > _MAX_NAMED else [])]
        return said + (f" ({', '.join(named)})" if named else "")


def judge_memory(rows: Sequence[StepRow], known: Mapping[str, Found] | None = None) -> MemoryVerdicts:
    """The verdicts on all rows that a plan expresses; a run that failed is one whose status names memory.

    ``known``: what `evaluate_steps` said of some of the rows, by their ids.
    """
    known = known or {}
    judged: list[tuple[bool, StepRow, StepCase]] = []
    for row in rows:
        failed = _OUT_OF_MEMORY in row.get("status", "")
        if not (failed or row.get("iter_time_s")):
            continue
        try:
            judged.append((failed, row, read_step({**row, "iter_time_s": "", "status": ""})))
        except (CellError, TransformerError):
            continue
    others = [case for _, _, case in judged if case.row_id not in known]
    predicted = {**known, **dict(zip([case.row_id for case in others], evaluate_steps(others), strict=True))}
    found: dict[tuple[bool, bool], list[str]] = {
        (failed, over): [] for failed in (True, False) for over in (True, False)
    }
    for failed, row, case in judged:
        item = predicted[case.row_id]
        if isinstance(item, StepPrediction):
            found[failed, item.reserved_bytes > usable_bytes(row, case)].append(case.row_id)
    return MemoryVerdicts(
        refused=tuple(found[True, True]),
        missed=tuple(found[True, False]),
        wrongly_refused=tuple(found[False, True]),
        num_timed=len(found[False, True]) + len(found[False, False]),
    )


def usable_bytes(row: StepRow, case: StepCase) -> int:
    """What may be reserved of the memory that a row states of its device, or that the kind of device has."""
    stated = re.search(r"-([0-9]+)GB", row["device"])
    memory_bytes = case.software.memory_share * (int(stated[1]) * _GIB if stated else case.kind.memory_bytes)
    return MemoryLimit().usable_bytes(replace(case.kind, memory_bytes=round(memory_bytes)))
