"""The shipped figures of step predictions: one set of efficiencies per kind of device, whence, and how wrong they were.

The document ``cost/models/steps.json`` names the rows that the sets were fitted on by hash, so that `validate` can
refuse to score them. A kind of device without rows takes the set of another, which the document names.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import ClassVar, Literal

from meshwright.cost.prediction import Interval
from meshwright.cost.steps.prices import Efficiencies
from meshwright.spec import decode_document
from meshwright.spec.parsing import read_data

# What a step's interval depends on: paced by the device, of the kind that most rows were fitted on; the same on another
# kind; paced by the host; of a model made of convolutions, of whose kernels nothing was measured.
Regime = Literal["fitted", "elsewhere", "small", "convolutions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """Efficiencies by kind of device, the intervals of each regime, and the hashes of the fitted rows (hex).

    ``device``: the kind that most rows were fitted on; the others were held near its set. ``stand_ins``: by kind
    without a set, the kind whose set it takes; any other takes that of ``device``.
    """

    device: str
    rule: str
    efficiencies: dict[str, Efficiencies]
    stand_ins: dict[str, str]
    intervals: dict[Regime, Interval]
    fitted_rows: tuple[str, ...]

    SCHEMA_VERSION: ClassVar[int] = 2

    def efficiencies_of(self, device: str) -> Efficiencies:
        """The set of a kind of device."""
        kind = device if device in self.efficiencies else self.stand_ins.get(device, self.device)
        return self.efficiencies[kind]


@cache
def load_step_model() -> StepModel:
    """The shipped model."""
    with resources.as_file(resources.files("meshwright.cost") / "models" / "steps.json") as path:
        return decode_document(StepModel, read_data(path), path.name)
