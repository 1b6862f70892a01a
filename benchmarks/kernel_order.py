"""How often a larger product takes less time than a smaller one, as measured and as predicted.

Of all rows with the same columns n and inner dimension k, each is compared with the one with the next number of rows m,
if both numbers are multiples of the same power of two, up to 64. A fall is a time at least 3 % shorter. Measured rows
fall too: libraries choose another kernel there.
"""

from itertools import pairwise

import numpy as np
from harness import make_row, parse_options, publish

from meshwright.cost.kernels import shipped_model
from meshwright.cost.kernels.kernel_fit import split_parts
from meshwright.cost.kernels.kernel_model import MIN_ROWS
from meshwright.validation import load_records
from meshwright.validation.kernels import kinds

# Most tiles have a multiple of 64 rows (`cost.kernels.demand`).
_MOST_ALIGNED = 64
# Less is noise: an agreed figure, the same for measured and predicted rows.
_FALL = 0.03


def next_larger(sizes):
    """Pairs of rows, shape (pairs, 2): the second has the next larger m at the same n, k and alignment of m."""
    m = sizes["m"].astype(np.int64)
    aligned = np.minimum(m & -m, _MOST_ALIGNED)
    groups = {}
    for index in np.argsort(m, kind="stable"):
        groups.setdefault((sizes["n"][index], sizes["k"][index], aligned[index]), []).append(int(index))
    pairs = [(i, j) for group in groups.values() for i, j in pairwise(group) if m[i] < m[j]]
    return np.array(pairs, np.int64).reshape(-1, 2)


def share_of_falls(seconds, pairs):
    """The share of pairs, at least one, of which the larger takes less time by more than repeated runs differ."""
    smaller, larger = seconds[pairs].T
    return float((larger < (1 - _FALL) * smaller).mean())


def share_of_false_falls(predicted, measured, pairs):
    """The share of pairs, at least one, of which the larger is predicted to fall and was measured to take no less."""
    (smaller, larger), (short, long) = predicted[pairs].T, measured[pairs].T
    return float(((larger < (1 - _FALL) * smaller) & (long >= short)).mean())


def main() -> int:
    options = parse_options(__doc__)
    rows = []
    for part in split_parts(load_records("kernels").where(op="matmul"), kinds()):
        pairs = next_larger(part.sizes)
        if len(part.seconds) < MIN_ROWS or not len(pairs):
            continue
        predicted = shipped_model().predict(part.kernel, part.sizes).seconds
        ours, measured = (share_of_falls(seconds, pairs) for seconds in (predicted, part.seconds))
        false = share_of_false_falls(predicted, part.seconds, pairs)
        name = f"{part.kernel.device.name}, {part.kernel.dtype}, {part.kernel.family}, {len(pairs)} pairs"
        rows.append(make_row(f"{name}: falls", 100 * ours, "%", baseline=100 * measured, target=100 * measured))
        rows.append(make_row(f"{name}: falls that were not measured", 100 * false, "%"))
    return publish("kernel_order", rows, options)


if __name__ == "__main__":
    raise SystemExit(main())
