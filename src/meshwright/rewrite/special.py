"""Numbers that are not finite: what does a rule do to them?

``x * 0 = 0`` is true of numbers and false of infinity; ``x - x = 0`` is false of NaN: such a rule loses them, and is
used only where its tensors are known to be finite. A product in another order keeps them where they are, but may make
NaN of infinity.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from meshwright.rewrite.calculus import Doubles, IllTypedError
from meshwright.rewrite.fuzz import compute, draw_sizes, fitted_instances
from meshwright.rewrite.instances import MOST_DIMS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from meshwright.rewrite.rules import Rule

_NUM_SIZES = 3
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Special:
    """Names of a rule's tensors whose special numbers do not stay what they are.

    ``lost``: a result becomes finite, or another one. ``changed``: what is not finite stays so, in the same places, as
    NaN instead of infinity or the reverse.
    """

    lost: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    @property
    def kept(self) -> bool:
        """Whether all special numbers stay what they are."""
        return not self.lost and not self.changed


def special_numbers(rule: Rule, *, seed: int = 0, most_dims: int = MOST_DIMS) -> Special:
    """What becomes of one number of one tensor that is NaN or infinite.

    Tried at a few sizes of each choice of ranks and dims; of a rule of which no trial could be made all are lost.
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
    """Whether a trial could be made: not where the right side has letters of its own, or is ill typed."""
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
            # NaN may decide numbers that are finite: it is neither above nor below another.
            if np.allclose(left, right, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True):
                continue
            finite = np.isfinite(left)
            same = np.array_equal(finite, np.isfinite(right)) and np.allclose(
                left[finite], right[finite], rtol=_TOLERANCE, atol=_TOLERANCE
            )
            (changed if same else lost).add(name)
    return True
