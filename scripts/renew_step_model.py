"""Fit the efficiencies of step predictions anew and write src/meshwright/cost/models/steps.json.

    .venv/bin/python scripts/renew_step_model.py

The rows that are fitted are those of `meshwright.validation.step_split`.
"""

from pathlib import Path

from meshwright.spec import write_document
from meshwright.validation.datasets import load_all_steps
from meshwright.validation.step_model import fit_model

TARGET = Path(__file__).resolve().parent.parent / "src" / "meshwright" / "cost" / "models" / "steps.json"

if __name__ == "__main__":
    model = fit_model(load_all_steps())
    write_document(model, TARGET)
    for kind, efficiencies in model.efficiencies.items():
        print(f"{TARGET.name}: {kind} {efficiencies}")
