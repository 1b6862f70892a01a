"""Fit the efficiencies of step predictions anew and write src/meshwright/cost/models/steps.json.

    .venv/bin/python scripts/renew_step_model.py

The rows that are fitted are named in `meshwright.validation.step_model`.
"""

from pathlib import Path

from meshwright.spec import write_document
from meshwright.validation.datasets import load_records, load_steps
from meshwright.validation.step_model import fit_model

TARGET = Path(__file__).resolve().parent.parent / "src" / "meshwright" / "cost" / "models" / "steps.json"

if __name__ == "__main__":
    model = fit_model([*load_steps(), *load_steps(single_node=True)], load_records("kernels"))
    write_document(model, TARGET)
    print(f"{TARGET.name}: {model.efficiencies}")
