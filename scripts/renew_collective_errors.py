"""Fit the errors of collectives by datasheet anew and write src/meshwright/cost/models/collectives.json.

.venv/bin/python scripts/renew_collective_errors.py
"""

from pathlib import Path

from meshwright.spec import write_document
from meshwright.validation import load_records
from meshwright.validation.collectives import fit_datasheet_errors

TARGET = Path(__file__).resolve().parent.parent / "src" / "meshwright" / "cost" / "models" / "collectives.json"

if __name__ == "__main__":
    errors = fit_datasheet_errors(load_records("nccl"), load_records("v100"))
    write_document(errors, TARGET)
    print(f"{TARGET.name}: {errors.inside}, across nodes {errors.across}")
