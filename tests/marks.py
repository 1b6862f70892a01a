"""Cases left to CI one by one. Where all but the first are, the marker `matrix` says so (tests/conftest.py)."""

from typing import Any

import pytest


def left_to_ci(*cases: Any) -> list[Any]:
    """More cases of what one in `make test` shows in part; of several parameters, a case is a tuple."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long) for case in cases]
