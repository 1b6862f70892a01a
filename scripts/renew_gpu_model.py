"""Fit the model of GPU kernels anew and write src/meshwright/cost/models/gpu.json.

    .venv/bin/python scripts/renew_gpu_model.py

Prints how far off it is on each op, and on the third of its sizes that took longest, or shortest, left out of the fit.
"""

from collections import defaultdict
from pathlib import Path

import numpy as np
from gpu_fit import fit_shipped, kernels_of, left_out, load_ops, measured_kind, predicted

from meshwright.spec import write_document

TARGET = Path(__file__).resolve().parent.parent / "src" / "meshwright" / "cost" / "models" / "gpu.json"


def errors(ratios: list[float]) -> str:
    off = np.abs(np.log(ratios)) if ratios else np.full(1, np.nan)
    return f"{np.median(off):6.1%} {np.quantile(off, 0.9):6.1%}"


def main() -> None:
    model, kind = fit_shipped(), measured_kind()
    write_document(model, TARGET)
    columns: list[dict[tuple[str, str], list[float]]] = [defaultdict(list) for _ in range(3)]
    rows = [row for row in load_ops() if kernels_of(row, kind.num_multiprocessors)]
    for row in rows:
        columns[0][row.op, row.dtype].append(row.seconds / predicted(model.rates, row, kind))
    for column, part in zip(columns[1:], ("large", "small"), strict=True):
        for row, ratio in left_out(rows, kind, part):
            column[row.op, row.dtype].append(ratio)
    print("op, dtype: median and 90 % of |ln(measured / predicted)| as fitted, largest left out, smallest left out")
    for key in columns[0]:
        print(f"{key[0]:36s} {key[1]:9s} " + "  ".join(errors(column[key]) for column in columns))
    everything = [[ratio for ratios in column.values() for ratio in ratios] for column in columns]
    print(f"{'all':46s} " + "  ".join(errors(ratios) for ratios in everything))


if __name__ == "__main__":
    main()
