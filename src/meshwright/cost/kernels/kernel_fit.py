"""Fit the kernel predictor (`fit_kernels`) and adapt it to further rows (`adapt_kernels`), with intervals.

A law is fitted for each device and kernel family, and trees for each op. Every interval comes from rows that were not
used for the prediction. For the basis "regressed", a fifth of the keys of the training rows is held out once. For
"transferred", every device is held out alone, and together with similar devices (`fit_transfers`). Then all rows are
used. The hyper-parameters are fixed: `boosting.BoostingSettings` and `law.FACTORS`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from meshwright.cost.costs import Floats, Interval, fit_interval
from meshwright.cost.kernels.boosting import (
    NUM_PLACED,
    BoostingSettings,
    Correction,
    Scale,
    Trees,
    fit_correction,
    fit_trees,
)
from meshwright.cost.kernels.demand import SIZES, Demand, check_sizes, demand_of, dispatch_of, family_of, has_rate
from meshwright.cost.kernels.kernel_model import MIN_ROWS, Kernel, KernelGroup, KernelModel, OpModel, explain, prior_of
from meshwright.cost.kernels.law import Prior, first_prior, fit_law, shared_prior
from meshwright.spec import DeviceKind, MeasurementError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from meshwright.records import Records


Step = Literal["sister", "near", "far"]
STEPS: tuple[Step, ...] = ("sister", "near", "far")

# Points at which the distribution of a sample is read, so that all samples have the same weight.
_QUANTILES = np.linspace(0.0, 1.0, 201)
# The interval of a transfer without any rows: about as wide as that of a roofline (`cost.op_estimates.ROOFLINE`), in
# both directions.
UNKNOWN = Interval(low=0.1, high=10.0)


def left_out_sets(capabilities: Mapping[str, float]) -> list[frozenset[str]]:
    """Return the sets of devices to hold out together: each device alone, and all of one compute capability.

    ``capabilities``: the CUDA compute capability of each device. The set of all devices is left out.
    """
    alone = [frozenset((device,)) for device in capabilities]
    alike = [
        frozenset(device for device, there in capabilities.items() if there == here)
        for here in sorted(set(capabilities.values()))
    ]
    return [some for some in dict.fromkeys((*alone, *alike)) if len(some) < len(capabilities)]


# The error on a device without rows depends on the similarity of measured devices, which is one of three steps:
#
#     sister   the same code was measured on a device of the same compute capability
#     near     the same code, on devices of others
#     far      only other code, or other arithmetic
#
# Every device is held out alone, and with all of its compute capability. Its residuals, with those of the devices held
# out with it, are one sample of the error of such a step. The interval of a step goes from the 10 % to the 90 %
# quantile of its samples, which have equal weights whatever their numbers of rows, and is at least as wide as that of a
# smaller step. A step without samples has the interval of the next larger one.
#
# Source: conformal prediction for a new group, by pooled distributions (Dunn, Wasserman and Ramdas, JASA 2023).
def fit_transfers(samples: Sequence[tuple[Step, Floats]]) -> dict[Step, Interval]:
    """Return, for each degree of similarity of the measured devices, the 80 % interval of measured / predicted.

    The degrees are listed above and in `STEPS`. ``samples``: pairs of the degree and the residuals ln(measured /
    predicted), shape (rows,), of one held-out set.
    """
    found: dict[Step, Interval] = {}
    widest = Interval(low=1.0, high=1.0)
    for step in STEPS:
        alike = [np.quantile(rests, _QUANTILES) for one, rests in samples if one == step and len(rests)]
        if alike:
            widest = found[step] = join_intervals(widest, interval_of(np.concatenate(alike)))
    following = UNKNOWN
    for step in reversed(STEPS):
        following = found.setdefault(step, following)
    return found


def join_intervals(here: Interval, there: Interval) -> Interval:
    """Return the narrowest interval that contains both intervals."""
    return Interval(low=min(here.low, there.low), high=max(here.high, there.high))


def interval_of(rests: Floats) -> Interval:
    """Return the 80 % interval for residuals ln(measured / predicted), shape (rows,), of at least one row."""
    return fit_interval(np.exp(rests), np.ones(len(rests)))


DEFAULTS = BoostingSettings()
# One in this number of keys is held out for the intervals.
_FOLDS = 5
# The fewest residuals for an interval.
_MIN_RESIDUALS = 20
# Below this number of the device's own rows, the interval for unmeasured devices is included too.
_MIN_OWN = 9
# The most rows of a correction, which evaluates all of them for every query.
_MAX_CORRECTED = 500
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FitRows:
    """The measured rows of one kernel (op, dtype, device and family).

    ``sizes``: columns named as in `SIZES`. ``seconds`` and ``keys`` (the sizes as text) have one entry per row, too.
    """

    kernel: Kernel
    sizes: Mapping[str, Floats]
    seconds: Floats
    keys: NDArray[np.object_]

    def take(self, mask: NDArray[np.bool_]) -> FitRows:
        """Return the rows for which ``mask``, of shape (rows,), is true."""
        return FitRows(
            kernel=self.kernel,
            sizes={name: column[mask] for name, column in self.sizes.items()},
            seconds=self.seconds[mask],
            keys=self.keys[mask],
        )

    def law(self, prior: Prior) -> Floats:
        """Return the logarithms of the law's factors, fitted to these rows with a prior."""
        return fit_law(self._demand(), self.seconds, prior)

    def explain(self, factors: Floats, families: tuple[str, ...]) -> tuple[Floats, NDArray[np.float32]]:
        """Return the residuals ln(measured / law), shape (rows,), and the features, shape (features, rows)."""
        law, columns = explain(self.kernel, self.sizes, self._demand(), factors, self.kernel.family, families)
        return np.log(self.seconds) - law, columns

    def _demand(self) -> Demand:
        return demand_of(self.kernel.op, self.sizes, self.kernel.dtype, self.kernel.family, self.kernel.device)


def fit_kernels(rows: Records, kinds: Mapping[str, DeviceKind], settings: BoostingSettings = DEFAULTS) -> KernelModel:
    """Return the predictor fitted to measured rows.

    Rows of ops that `demand.SIZES` lacks, or of devices that ``kinds`` lacks, are ignored. Raises MeasurementError if
    no group (op, dtype, device and family) has `MIN_ROWS` rows.
    """
    parts = split_parts(rows, kinds)
    families = tuple(sorted({family_of(part.kernel.family) for part in parts}))
    groups: list[KernelGroup] = []
    ops = {}
    for op in SIZES:
        mine = [part for part in parts if part.kernel.op == op]
        if mine:
            found, ops[op] = _fit_op(mine, families, settings)
            groups.extend(found)
    return KernelModel(groups=tuple(groups), ops=ops, families=families, row_hashes=_hashes(rows, kinds))


def adapt_kernels(model: KernelModel, rows: Records, kinds: Mapping[str, DeviceKind]) -> KernelModel:
    """Return the model adapted to further rows, few or many, of known or new devices or kernel families.

    Rows without a family are assumed to be of the usual family. Rows that the model was already fitted to are skipped;
    if no other rows exist, the model is returned unchanged. Raises MeasurementError for an op that the model lacks.
    """
    rows = rows.select(_usable(rows, kinds))
    rows = rows.select(~np.isin(rows.row_hashes(), model.row_hashes))
    if not len(rows):
        return model
    groups = {group.key: group for group in model.groups}
    for part in split_parts(_name_families(model, rows, kinds), kinds):
        group = _adapt(model, part)
        groups[group.key] = group
    hashes = np.union1d(model.row_hashes, _hashes(rows, kinds))
    return replace(model, groups=tuple(groups.values()), row_hashes=hashes)


def _name_families(model: KernelModel, rows: Records, kinds: Mapping[str, DeviceKind]) -> Records:
    asked = list(zip(rows.op, rows.dtype, rows.device, strict=True))
    usual = {
        (op, dtype, device): model.usual_family(Kernel(op=op, dtype=dtype, device=kinds[device]))
        for op, dtype, device in set(asked)
    }
    names = [kernel or usual[query] for kernel, query in zip(rows.kernel, asked, strict=True)]
    return replace(rows, kernel=np.array(names, object))


def split_parts(rows: Records, kinds: Mapping[str, DeviceKind]) -> list[FitRows]:
    """Return the rows grouped by op, dtype, device and kernel family, in sorted order.

    These rows are skipped: flagged rows, and rows of ops that `SIZES` lacks, of devices that ``kinds`` lacks, and of
    dtypes without a peak FLOP/s in the datasheet.
    """
    known = _usable(rows, kinds)
    names = list(zip(rows.op, rows.dtype, rows.device, rows.kernel, strict=True))
    parts = []
    for group in sorted({name for name, use in zip(names, known, strict=True) if use}):
        some = rows.select(np.array([name == group for name in names], np.bool_))
        op, dtype, device, family = group
        parts.append(
            FitRows(
                kernel=Kernel(op=op, dtype=dtype, device=kinds[device], family=family),
                sizes=check_sizes(op, {name: some.size(name) for name in SIZES[op]}),
                seconds=some.seconds,
                keys=some.shapes,
            )
        )
    return parts


def _hashes(rows: Records, kinds: Mapping[str, DeviceKind]) -> NDArray[np.uint64]:
    return np.sort(rows.row_hashes()[_usable(rows, kinds)])


def _usable(rows: Records, kinds: Mapping[str, DeviceKind]) -> NDArray[np.bool_]:
    asked = list(zip(rows.device, rows.dtype, strict=True))
    rated = {pair for pair in set(asked) if pair[0] in kinds and has_rate(kinds[pair[0]], pair[1])}
    known = np.isin(rows.op, list(SIZES)) & np.array([pair in rated for pair in asked], np.bool_)
    usable: NDArray[np.bool_] = known & (rows.flags == "")
    return usable


def _fit_op(
    parts: list[FitRows], families: tuple[str, ...], settings: BoostingSettings
) -> tuple[list[KernelGroup], OpModel]:
    groups = _fit_laws(parts)
    explained = [part.explain(group.factors, families) for part, group in zip(parts, groups, strict=True)]
    trees = _fit_trees(explained, settings)
    own, law_rests = _left_out_rows(parts, families, settings)
    pooled = np.concatenate(own)
    scale = Scale(
        spread=np.maximum(np.concatenate([c[:NUM_PLACED] for _, c in explained], axis=1).std(axis=1), 1e-6),
        amplitude=_deviation(law_rests),
        noise=_deviation(pooled),
    )
    transfers = fit_transfers(_left_out_devices(parts, groups, explained, families, settings))
    # Families with few rows have larger errors than others: their residuals are pooled.
    small = np.concatenate([np.zeros(0), *(r for r, g in zip(own, groups, strict=True) if g.num_rows < MIN_ROWS)])
    few = interval_of(small if len(small) >= _MIN_RESIDUALS else pooled)
    fitted = [
        replace(group, interval=interval_of(rests) if group.num_rows >= MIN_ROWS else few)
        for group, rests in zip(groups, own, strict=True)
    ]
    return fitted, OpModel(trees=trees, scale=scale, transfers=transfers)


def _fit_laws(parts: list[FitRows]) -> list[KernelGroup]:
    """Return groups with their factors: large ones from their rows only, small ones with large ones as prior."""
    nothing = Interval(low=1.0, high=1.0)
    groups = [
        KernelGroup(
            op=part.kernel.op,
            dtype=part.kernel.dtype,
            device=part.kernel.device.name,
            family=family_of(part.kernel.family),
            dispatch=dispatch_of(part.kernel.family, part.kernel.device.compute_capability),
            capability=part.kernel.device.compute_capability,
            num_rows=len(part.seconds),
            factors=part.law(first_prior()) if len(part.seconds) >= MIN_ROWS else first_prior().mean,
            interval=nothing,
        )
        for part in parts
    ]
    return [
        group
        if group.num_rows >= MIN_ROWS
        else replace(group, factors=part.law(prior_of(groups, part.kernel, part.kernel.family)[0]))
        for part, group in zip(parts, groups, strict=True)
    ]


def _fit_trees(explained: list[tuple[Floats, NDArray[np.float32]]], settings: BoostingSettings) -> Trees:
    columns = np.ascontiguousarray(np.concatenate([columns for _, columns in explained], axis=1))
    return fit_trees(columns, np.concatenate([rests for rests, _ in explained]), settings)


def _left_out_rows(
    parts: list[FitRows], families: tuple[str, ...], settings: BoostingSettings
) -> tuple[list[Floats], Floats]:
    """Return residuals of a fifth of the keys, by part, from a fit without them; and those of the law alone, pooled."""
    keys = sorted({key for part in parts for key in part.keys})
    chosen = np.random.default_rng(_SEED).permutation(len(keys))[: len(keys) // _FOLDS]
    out = {keys[index] for index in chosen}
    masks = [np.array([key in out for key in part.keys], np.bool_) for part in parts]
    train = [part.take(~mask) for part, mask in zip(parts, masks, strict=True)]
    groups = _fit_laws(train)
    trees = _fit_trees(
        [part.explain(group.factors, families) for part, group in zip(train, groups, strict=True)], settings
    )
    laws, rests = [], []
    for part, mask, group in zip(parts, masks, groups, strict=True):
        law, columns = part.take(mask).explain(group.factors, families)
        laws.append(law)
        rests.append(law - trees.evaluate(columns))
    return rests, np.concatenate(laws)


def _left_out_devices(
    parts: list[FitRows],
    groups: list[KernelGroup],
    explained: list[tuple[Floats, NDArray[np.float32]]],
    families: tuple[str, ...],
    settings: BoostingSettings,
) -> list[tuple[Step, Floats]]:
    """Return residuals of large parts of devices from fits without these devices, by step to the others."""
    samples: list[tuple[Step, Floats]] = []
    for out in left_out_sets({group.device: group.capability for group in groups}):
        others = [group for group in groups if group.device not in out]
        if not any(group.num_rows >= MIN_ROWS for group in others):
            continue
        trees = _fit_trees([e for e, group in zip(explained, groups, strict=True) if group.device not in out], settings)
        rests: dict[Step, list[Floats]] = {}
        for part in parts:
            if part.kernel.device.name in out and len(part.seconds) >= MIN_ROWS:
                prior, step = prior_of(others, part.kernel, part.kernel.family)
                law, columns = part.explain(prior.mean, families)
                rests.setdefault(step, []).append(law - trees.evaluate(columns))
        samples.extend((step, np.concatenate(found)) for step, found in rests.items())
    return samples


def _adapt(model: KernelModel, part: FitRows) -> KernelGroup:
    """Return one group adapted to further rows, with an interval from their folds."""
    shared = model.ops.get(part.kernel.op)
    if shared is None:
        raise MeasurementError(
            f"The kernel predictor does not contain the op {part.kernel.op!r}; fit a predictor with rows of this op."
        )
    known = next((group for group in model.groups if group.key == _key(part.kernel)), None)
    if known is not None:
        prior, alone = shared_prior([known.factors]), known.interval
    else:
        prior, step = prior_of(model.groups, part.kernel, part.kernel.family)
        alone = shared.transfers[step]
    folds = np.random.default_rng(_SEED).permutation(len(part.seconds)) % min(_FOLDS, len(part.seconds))

    def rests_of(train: FitRows, test: FitRows) -> tuple[Floats, Floats, Correction]:
        factors = train.law(prior)
        law, columns = train.explain(factors, model.families)
        places = shared.scale.place(columns)
        some = np.random.default_rng(_SEED).permutation(len(places))[:_MAX_CORRECTED]
        rests = law - shared.trees.evaluate(columns)
        correction = fit_correction(places[some], rests[some], shared.scale)
        law, columns = test.explain(factors, model.families)
        left = law - shared.trees.evaluate(columns) - correction.evaluate(shared.scale.place(columns))
        return factors, left, correction

    left = [
        rests_of(part.take(folds != fold), part.take(folds == fold))[1] for fold in range(folds.max() + 1)
        if len(part.seconds) > 1
    ]  # fmt: skip
    factors, _, correction = rests_of(part, part)
    interval = interval_of(np.concatenate(left)) if left else alone
    if len(part.seconds) < _MIN_OWN:
        interval = join_intervals(interval, alone)
    return KernelGroup(
        op=part.kernel.op,
        dtype=part.kernel.dtype,
        device=part.kernel.device.name,
        family=family_of(part.kernel.family),
        dispatch=dispatch_of(part.kernel.family, part.kernel.device.compute_capability),
        capability=part.kernel.device.compute_capability,
        num_rows=len(part.seconds) + (known.num_rows if known else 0),
        factors=factors,
        interval=interval,
        correction=correction,
    )


def _key(kernel: Kernel) -> tuple[str, str, str, str]:
    return kernel.op, kernel.dtype, kernel.device.name, family_of(kernel.family)


def _deviation(rests: Floats) -> float:
    """Return the standard deviation of a normal distribution with this median of |residuals|."""
    return 1.4826 * float(np.median(np.abs(rests)))
