"""Compiled loops work where nothing can be cached."""

from __future__ import annotations

import numba
import pytest

from meshwright.cost.compiled import compiled


def test_compiles_without_a_place_for_the_cache():
    """A function without a source file has no cache folder, like an installation that cannot be written to."""
    scope: dict = {}
    exec("def add(a, b):\n    return a + b", scope)
    with pytest.raises(RuntimeError, match="cannot cache"):
        numba.njit(cache=True)(scope["add"])
    assert compiled(scope["add"])(2, 3) == 5
