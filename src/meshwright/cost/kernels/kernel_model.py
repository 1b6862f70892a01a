"""The predictor of GPU kernels (`KernelModel`), in three stages: a law, trees, and corrections.

    ln t = ln law(query; factors of device and family) + trees of the op(features) + correction(features)

The law has factors for each device and kernel family. The trees are fitted to its residual. The correction exists for
devices with few measured rows. The basis of a prediction:

regressed    the device was measured: factors, trees and interval come from its rows (`fit_kernels`); with few rows,
             from other devices, adapted to its rows (`adapt_kernels`)
transferred  the device was not measured: the factors are the mean over the most similar measured devices
"""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.costs import Basis, Floats, Interval, Predictions
from meshwright.cost.kernels.boosting import Correction, Scale, Trees, features_of
from meshwright.cost.kernels.demand import (
    Demand,
    check_device,
    check_sizes,
    demand_of,
    dispatch_of,
    family_of,
    split_dtype,
)
from meshwright.cost.kernels.law import Prior, law_seconds, shared_prior
from meshwright.spec import DeviceKind, MeasurementError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from numpy.typing import ArrayLike, NDArray

    from meshwright.cost.kernels.kernel_fit import Step

# The fewest rows of a group that may represent its device for others.
MIN_ROWS = 200
# The step of each relation in `_kin`.
_KIN_STEPS: tuple[Step, ...] = ("near", "far", "far", "far", "far")
# Queries that are estimated at a time: their ways to be cut into tiles stay in the CPU's cache.
_CHUNK = 4096
# From this number of chunks, all cores are used: the compiled loops release the interpreter's lock.
_MANY = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel without sizes: op (a key of `SIZES`), dtype, device kind and kernel family ("" for the usual one)."""

    op: str
    dtype: str
    device: DeviceKind
    family: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelGroup:
    """The fit for one op, dtype, device and kernel family.

    ``dispatch``: how the family chooses tiles (`demand.dispatch_of`). ``capability``: CUDA compute capability.
    ``num_rows``: number of measured rows. ``factors``: logarithms of the law's factors, shape (factors,).
    """

    op: str
    dtype: str
    device: str
    family: str
    dispatch: str
    capability: float
    num_rows: int
    factors: Floats
    interval: Interval
    correction: Correction | None = None

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The key of the group: (op, dtype, device, family)."""
        return self.op, self.dtype, self.device, self.family


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpModel:
    """The parts of the predictor that all groups of an op have in common.

    ``scale``: scales of corrections. ``transfers``: intervals on devices without rows, by the similarity of the
    measured devices ("sister", "near" or "far"; see `kernel_fit`).
    """

    trees: Trees
    scale: Scale
    transfers: Mapping[Step, Interval]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelModel:
    """The fitted predictor of GPU kernels.

    ``ops``: the common parts by op. ``families``: names of the fitted kernel families. ``row_hashes``: hashes of the
    measured rows of the fit.
    """

    groups: tuple[KernelGroup, ...]
    ops: Mapping[str, OpModel]
    families: tuple[str, ...]
    row_hashes: NDArray[np.uint64]
    _by_key: dict[tuple[str, str, str, str], KernelGroup] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._by_key.update((group.key, group) for group in self.groups)

    def predict(self, kernel: Kernel, sizes: Mapping[str, ArrayLike]) -> Predictions:
        """Return the seconds of n queries of a kernel, with intervals and basis.

        ``sizes``: columns of shape (n,), or numbers, named as in `demand.SIZES`. A window of 0 means no window. A
        matmul may have a ``count`` of equal products. Raises MeasurementError for invalid sizes, for an op that the
        model lacks, and for a device whose datasheet states no multiprocessors, cache or clock, or no rate of the dtype
        (`demand`).
        """
        if kernel.op not in self.ops:
            raise MeasurementError(
                f"The kernel predictor does not contain the op {kernel.op!r}; it contains "
                f"{', '.join(sorted(self.ops))}."
            )
        check_device(kernel.device, kernel.dtype)
        columns = check_sizes(kernel.op, sizes)
        family = kernel.family or self.usual_family(kernel)
        group = self._by_key.get((kernel.op, kernel.dtype, kernel.device.name, family_of(family)))
        shared = self.ops[kernel.op]
        if group is not None:
            factors, interval = group.factors, group.interval
        else:
            prior, step = prior_of(self.groups, kernel, family)
            factors, interval = prior.mean, shared.transfers[step]
        starts = range(0, len(next(iter(columns.values()))), _CHUNK)
        chunks = ({name: column[start : start + _CHUNK] for name, column in columns.items()} for start in starts)

        def estimate(sizes: Mapping[str, Floats]) -> Floats:
            return self._chunk(kernel, sizes, family, factors, group)

        if len(starts) < _MANY:
            parts = [estimate(chunk) for chunk in chunks]
        else:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                parts = list(pool.map(estimate, chunks))
        seconds = np.concatenate([np.zeros(0), *parts])
        if not (np.isfinite(seconds) & (seconds > 0)).all():
            raise MeasurementError(
                f"The predicted seconds of {kernel.op!r} on {kernel.device.name!r} are zero, infinite or not a number. "
                "Correct the rates, cache and clock of the device kind."
            )
        low, high = interval.around(seconds)
        basis: Basis = "transferred" if group is None else "regressed"
        return Predictions(seconds=seconds, low_s=low, high_s=high, basis=(basis,) * len(seconds))

    def usual_family(self, kernel: Kernel) -> str:
        """Return the kernel family with the most measured rows of a kernel's op; "" if the op has no rows.

        Rows of the kernel's device and dtype count. If these are missing: rows of its dtype on any device; then
        rows of dtypes that use the same arithmetic units; then all rows. After the model was adapted to a device, the
        rows of the adaptation are the rows of that device.
        """
        for kin in _kin(kernel, None):
            counts = Counter({group.family: 0 for group in self.groups})
            counts.update({group.key[3]: group.num_rows for group in self.groups if kin(group)})
            if counts.total():
                return counts.most_common(1)[0][0]
        return ""

    def _chunk(
        self, kernel: Kernel, sizes: Mapping[str, Floats], family: str, factors: Floats, group: KernelGroup | None
    ) -> Floats:
        shared = self.ops[kernel.op]
        # Absurd datasheets lead to overflow; `predict` refuses them by the result.
        with np.errstate(all="ignore"):
            demand = demand_of(kernel.op, sizes, kernel.dtype, family, kernel.device)
            law, columns = explain(kernel, sizes, demand, factors, family, self.families)
            total = law + shared.trees.evaluate(columns)
            if group is not None and group.correction is not None:
                total += group.correction.evaluate(shared.scale.place(columns))
            seconds: Floats = np.exp(total)
        return seconds


def prior_of(groups: Iterable[KernelGroup], kernel: Kernel, family: str) -> tuple[Prior, Step]:
    """Return the prior of the law's factors from the most similar groups with `MIN_ROWS` rows, and their similarity.

    The similarity is "sister", "near" or "far" (see `kernel_fit`). Raises MeasurementError if no group of the op has
    `MIN_ROWS` rows.
    """
    large = [group for group in groups if group.num_rows >= MIN_ROWS]
    for step, kin in zip(_KIN_STEPS, _kin(kernel, family), strict=True):
        found = [group for group in large if kin(group)]
        if found:
            sister = any(group.capability == kernel.device.compute_capability for group in found)
            return shared_prior([group.factors for group in found]), "sister" if sister and step == "near" else step
    raise MeasurementError(
        f"No device has {MIN_ROWS} measured rows of {kernel.op!r}, so its times cannot be predicted on other devices. "
        "Add measurements of this op."
    )


def explain(
    kernel: Kernel, sizes: Mapping[str, Floats], demand: Demand, factors: Floats, family: str, families: tuple[str, ...]
) -> tuple[Floats, NDArray[np.float32]]:
    """Return ln(seconds by the law), shape (n,), and the features, shape (features, n), of n queries.

    ``factors``: logarithms of the law's factors. ``families``: names of all fitted kernel families.
    """
    explained = law_seconds(demand, factors)
    known = family_of(family)
    number = families.index(known) if known in families else -1
    return np.log(explained.seconds), features_of(
        kernel.op, sizes, demand, explained, number, kernel.device.compute_capability
    )


def _kin(kernel: Kernel, family: str | None) -> Iterable[Callable[[KernelGroup], bool]]:
    """Yield tests of similarity, nearest first; without a family, those by which the usual one is found."""
    arithmetic = split_dtype(kernel.dtype)[0]
    if family is None:
        asked = kernel.op, kernel.dtype, kernel.device.name
        yield lambda g: (g.op, g.dtype, g.device) == asked and g.correction is not None
        yield lambda g: (g.op, g.dtype, g.device) == asked
    else:
        same = family_of(family), dispatch_of(family, kernel.device.compute_capability)
        yield lambda g: (g.op, g.dtype, g.family, g.dispatch) == (kernel.op, kernel.dtype, *same)
    yield lambda g: (g.op, g.dtype) == (kernel.op, kernel.dtype)
    yield lambda g: g.op == kernel.op and split_dtype(g.dtype)[0] == arithmetic
    yield lambda g: g.op == kernel.op and split_dtype(g.dtype)[0] == "bfloat16"
    yield lambda g: g.op == kernel.op
