"""Fit the predictor of GPU kernels anew and write src/meshwright/cost/models/kernels.json.gz.

It is fitted on all public rows of kernels, so none of them can be scored with it: `meshwright validate` fits its own.
"""

from __future__ import annotations

from pathlib import Path

from meshwright.cost.kernels import fit_kernels, write_model
from meshwright.validation import load_records
from meshwright.validation.kernels import kinds

TARGET = Path(__file__).resolve().parent.parent / "src" / "meshwright" / "cost" / "models" / "kernels.json.gz"

if __name__ == "__main__":
    print(write_model(fit_kernels(load_records("kernels"), kinds()), TARGET))
