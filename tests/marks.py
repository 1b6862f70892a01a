"""What `make test` leaves to CI: cases one by one, and examples of properties.

By itself it leaves all cases of a test behind the second one (tests/conftest.py).
"""

from typing import Any

import pytest
from hypothesis import settings


def left_to_ci(*cases: Any) -> list[Any]:
    """More cases of what one in `make test` shows in part; of several parameters, a case is a tuple."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long) for case in cases]


def examples(number: int) -> int:
    """So many examples of a property; under the profile of `make test` no more than that has."""
    return min(number, settings().max_examples) if settings.get_current_profile_name() == "quick" else number
