"""The effect of a rule on NaN and infinity (special numbers), found by trials.

``x * 0 = 0`` is true for finite numbers and false for infinity; ``x - x = 0`` is false for NaN. Such a rule loses
special numbers, and is used only if its tensors are known to be finite. A product that is computed in another order
keeps special numbers in their positions, but may turn infinity into NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.rewrite.calculus import Doubles, IllTypedError
from meshwright.rewrite.fuzz import compute, draw_sizes, fitted_instances
from meshwright.rewrite.instances import MOST_DIMS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwright.rewrite.rules import Rule

_NUM_SIZES = 3
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Special:
    """Names of a rule's tensors whose NaN and infinity have another effect on the two sides.

    ``lost``: non-finite results occur in different positions on the two sides, or finite results differ. ``changed``:
    non-finite results stay in the same positions, but NaN becomes infinity or the reverse.
    """

    lost: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    @property
    def kept(self) -> bool:
        """True if the rule preserves NaN and infinity of all its tensors."""
        return not self.lost and not self.changed


def special_numbers(rule: Rule, *, seed: int = 0, most_dims: int = MOST_DIMS) -> Special:
    """Return the effect of a rule on a single NaN or infinity in one of its tensors.

    A trial puts one special number at a random position of one tensor and compares both sides in float64. Each choice
    of ranks and dims is tried at a few sizes. If no trial is possible, all tensors of the rule count as ``lost``.
    """
    rng = np.random.default_rng(seed)
    lost: set[str] = set()
    changed: set[str] = set()
    tried = False
    for instance in fitted_instances(rule, most_dims):
        for count, (shapes, letters) in enumerate(draw_sizes(rule, instance, rng)):
            if count == _NUM_SIZES:
                break
            tried = _try(rule, shapes, letters, rng, lost, changed) or tried
    if not tried:
        return Special(lost=tuple(rule.names))
    return Special(
        lost=tuple(name for name in rule.names if name in lost),
        changed=tuple(name for name in rule.names if name in changed and name not in lost),
    )


def _try(
    rule: Rule,
    shapes: Mapping[str, tuple[int, ...]],
    letters: Mapping[str, Any],
    rng: np.random.Generator,
    lost: set[str],
    changed: set[str],
) -> bool:
    """Whether a trial was possible: not if the right side has its own letters, or is ill typed."""
    if any(name not in letters for name, _ in rule.letters):
        return False
    for name, special in product(shapes, (np.nan, np.inf, -np.inf)):
        if not np.prod(shapes[name]):
            continue
        arrays = {other: rng.standard_normal((1, *shape)) for other, shape in shapes.items()}
        arrays[name].flat[rng.integers(arrays[name].size)] = special
        try:
            with np.errstate(all="ignore"):
                lefts = compute(rule.left, arrays, letters, Doubles())
                rights = compute(rule.right, arrays, letters, Doubles())
        except (IllTypedError, IndexError, ValueError):
            return False
        for left, right in zip(lefts, rights, strict=True):
            # NaN may affect finite results: it is neither above nor below another number.
            if np.allclose(left, right, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True):
                continue
            finite = np.isfinite(left)
            same = np.array_equal(finite, np.isfinite(right)) and np.allclose(
                left[finite], right[finite], rtol=_TOLERANCE, atol=_TOLERANCE
            )
            (changed if same else lost).add(name)
    return True
