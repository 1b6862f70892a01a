"""Folds of rows that are left out, in files committed before the first fit, grouped by configuration.

A file ``splits/NAME.json`` holds the seed, the number of folds and one digit per distinct key in sorted order, as
`draw_split` deals them out. It is never made anew for other figures: `read_folds` refuses rows whose keys are not those
of the file, and folds that are not those of its seed. Rows of one key (repetitions, the same sizes in another dtype
where that would give the answer away) share a fold.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from meshwright.spec import DocumentError, MeasurementError, decode_document
from meshwright.spec.parsing import read_data

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Folds of the distinct keys of a data set, in sorted order: ``folds[i]`` is the digit of key i."""

    dataset: str
    seed: int
    num_folds: int
    keys_sha256: str
    folds: str

    SCHEMA_VERSION: ClassVar[int] = 1


def draw_split(dataset: str, keys: Sequence[str], *, num_folds: int = 5, seed: int) -> Split:
    """Deal the distinct keys out to ``num_folds`` (at most 10) folds of equal size, in an order that the seed gives."""
    distinct = sorted(set(keys))
    folds = np.arange(len(distinct)) % num_folds
    np.random.default_rng(seed).shuffle(folds)
    return Split(
        dataset=dataset,
        seed=seed,
        num_folds=num_folds,
        keys_sha256=_digest(distinct),
        folds="".join(map(str, folds)),
    )


def read_folds(dataset: str, keys: Sequence[str]) -> NDArray[np.int64]:
    """The fold of each row, shape (rows,), from the committed file of the data set.

    Raises DocumentError if the file is missing, or if it was made for other keys.
    """
    source = resources.files("meshwright.validation") / "splits" / f"{dataset}.json"
    with resources.as_file(source) as path:
        split = decode_document(Split, read_data(path), path.name)
    distinct = sorted(set(keys))
    if split.keys_sha256 != _digest(distinct) or len(split.folds) != len(distinct):
        raise DocumentError(
            f"The folds of {dataset!r} were drawn for other rows ({len(split.folds)} keys; given {len(distinct)}). "
            "Folds are fixed before the first fit: restore the rows, or name the new data set and draw its own folds."
        )
    if draw_split(dataset, distinct, num_folds=split.num_folds, seed=split.seed).folds != split.folds:
        raise DocumentError(
            f"The folds of {dataset!r} are not those that seed {split.seed} deals out. Restore the file."
        )
    places = dict(zip(distinct, split.folds, strict=True))
    return np.array([int(places[key]) for key in keys], np.int64)


def refuse_seen(dataset: str, fitted: NDArray[np.uint64], scored: NDArray[np.uint64]) -> None:
    """Raise MeasurementError if a predictor was fitted on rows that it is to be scored on; both are hashes of rows."""
    seen = int(np.isin(scored, fitted).sum())
    if seen:
        raise MeasurementError(
            f"{dataset}: {seen} of {len(scored)} rows are among those that the predictor was fitted on; such a score "
            "says nothing. Score rows that were left out."
        )


def _digest(keys: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()
