"""Numbers that are not finite: does a rule keep them where they are?

``x * 0 = 0`` is true of numbers and false of infinity; ``x - x = 0`` is false of NaN. Such a rule is marked, and used
only where its tensors are known to be finite.
"""

from __future__ import annotations

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


def keeps_special_numbers(rule: Rule, *, seed: int = 0, most_dims: int = MOST_DIMS) -> bool:
    """Whether both sides are the same when one number of one tensor is NaN or infinite.

    Tried at a few sizes of each choice of ranks and dims; a rule of which no trial could be made does not.
    """
    rng = np.random.default_rng(seed)
    tried = False
    for instance in fitted_instances(rule, most_dims):
        for count, (shapes, letters) in enumerate(draw_sizes(rule, instance, rng)):
            if count == _NUM_SIZES:
                break
            found = _keeps(rule, shapes, letters, rng)
            if found is False:
                return False
            tried = tried or found is True
    return tried


def _keeps(
    rule: Rule, shapes: Mapping[str, tuple[int, ...]], letters: Mapping[str, Any], rng: np.random.Generator
) -> bool | None:
    """None where the right side has letters of its own, or is ill typed."""
    if any(name not in letters for name, _ in rule.letters):
        return None
    for name, special in product(shapes, (np.nan, np.inf, -np.inf)):
        arrays = {other: rng.standard_normal((1, *shape)) for other, shape in shapes.items()}
        arrays[name].flat[rng.integers(arrays[name].size)] = special
        try:
            with np.errstate(all="ignore"):
                lefts = compute(rule.left, arrays, letters, Doubles())
                rights = compute(rule.right, arrays, letters, Doubles())
        except (IllTypedError, IndexError, ValueError):
            return None
        for left, right in zip(lefts, rights, strict=True):
            # NaN may decide numbers that are finite: it is neither above nor below another.
            if not np.allclose(left, right, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True):
                return False
    return True
