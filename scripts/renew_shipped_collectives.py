"""Fit the collectives that ship anew and write src/meshwright/cost/models/nccl.json.

.venv/bin/python scripts/renew_shipped_collectives.py
"""

from pathlib import Path

from meshwright.spec import write_document
from meshwright.validation.collectives import fit_shipped

TARGET = Path(__file__).resolve().parent.parent / "src" / "meshwright" / "cost" / "models" / "nccl.json"

if __name__ == "__main__":
    shipped = fit_shipped()
    write_document(shipped, TARGET)
    print(f"{TARGET.name}: {', '.join(kind.model.device for kind in shipped.kinds)}; elsewhere {shipped.elsewhere}")
