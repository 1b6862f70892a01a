"""The shipped figures of step predictions: one set of efficiencies, where it comes from, and how wrong it was.

The document ``cost/models/steps.json`` names the rows that the set was fitted on by hash, so that `validate` can refuse
to score them. Devices of other kinds take the same shares of their own datasheets.
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

# What a step's interval depends on: kernels large enough to fill the device, on the fitted kind of device; the same on
# another kind; kernels so small that starting them sets the pace.
Regime = Literal["fitted", "elsewhere", "small"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """Efficiencies of one kind of device, the intervals of each regime, and the hashes of the fitted rows (hex).

    ``product_shares``: by kind of device and dtype, the share of the peak that large products alone were measured to
    reach. What products reach in training on another device, or in another dtype, is taken to differ as they do.
    """

    device: str
    rule: str
    efficiencies: Efficiencies
    product_shares: dict[str, dict[str, float]]
    intervals: dict[Regime, Interval]
    fitted_rows: tuple[str, ...]

    SCHEMA_VERSION: ClassVar[int] = 1

    def product_scales(self, device: str) -> dict[str, float]:
        """By dtype, what products reach on a kind of device over what 16-bit ones reach on the fitted kind."""
        here = self.product_shares[self.device]["bfloat16"]
        return {dtype: share / here for dtype, share in self.product_shares.get(device, {}).items()}


@cache
def load_step_model() -> StepModel:
    """The shipped model."""
    with resources.as_file(resources.files("meshwright.cost") / "models" / "steps.json") as path:
        return decode_document(StepModel, read_data(path), path.name)
