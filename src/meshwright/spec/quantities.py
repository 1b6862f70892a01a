"""Quantities with their unit as text: ``"8 h"``, ``"25 GB/s"``, ``"80 GiB"``. Inside they are SI floats.

A number without a unit is refused: hours could be taken for seconds.
"""

from __future__ import annotations

import math
import re
from typing import Any, ClassVar, Self

from meshwright.spec.errors import suggest

_TEXT = re.compile(r"\s*([+-]?[0-9.]+(?:e[+-]?[0-9]+)?)\s*([^\s0-9.].*?)?\s*", re.IGNORECASE)
_BYTES = {
    "B": 1.0,
    **{f"{prefix}B": 1e3**power for power, prefix in enumerate("kMGTP", 1)},
    **{f"{prefix}iB": 1024.0**power for power, prefix in enumerate("KMGTP", 1)},
}


class _Quantity(float):
    """A number with a unit, not negative; ``UNITS`` are the factors to the first unit, in which it is kept."""

    UNITS: ClassVar[dict[str, float]] = {}
    WORD: ClassVar[str] = ""
    EXAMPLES: ClassVar[str] = ""

    def encode_scalar(self) -> str:
        """The text that parses to the same number."""
        number = repr(float(self)).removesuffix(".0")
        return f"{number} {next(iter(self.UNITS))}"

    @classmethod
    def decode_scalar(cls, data: Any) -> Self:
        """Parse a text like those in EXAMPLES. Raises ValueError, which says what is expected."""
        expected = f"expected {cls.WORD} with its unit, as {cls.EXAMPLES}"
        if isinstance(data, int | float) and not isinstance(data, bool):
            raise ValueError(f"{data} has no unit; {expected}")
        match = _TEXT.fullmatch(data) if isinstance(data, str) else None
        if match is None:
            raise ValueError(f"{data!r} is not a number with a unit; {expected}")
        number, unit = match.groups()
        if unit is None:
            raise ValueError(f"{data!r} has no unit; {expected}")
        if unit not in cls.UNITS:
            raise ValueError(f"{data!r} has an unknown unit{suggest(unit, cls.UNITS)}; {expected}")
        try:
            value = float(number) * cls.UNITS[unit]
        except ValueError:
            raise ValueError(f"{number!r} is not a number; {expected}") from None
        if not 0 <= value < math.inf:
            raise ValueError(f"{data!r} is out of range; {expected}, not negative")
        return cls(value)


class Seconds(_Quantity):
    """A time in seconds."""

    UNITS: ClassVar = {
        "s": 1.0,
        "ms": 1e-3,
        "us": 1e-6,
        "µs": 1e-6,
        "ns": 1e-9,
        "min": 60.0,
        "h": 3600.0,
        "d": 86400.0,
    }
    WORD: ClassVar = "a time"
    EXAMPLES: ClassVar = '"8 h", "30 min" or "250 us"'


class Bytes(_Quantity):
    """A number of bytes."""

    UNITS: ClassVar = _BYTES
    WORD: ClassVar = "bytes"
    EXAMPLES: ClassVar = '"80 GiB" or "500 GB"'


class BytesPerSecond(_Quantity):
    """A bandwidth in bytes per second; ``Gbit/s`` as network cards are sold."""

    UNITS: ClassVar = {f"{unit}/s": factor for unit, factor in _BYTES.items()} | {
        f"{prefix}bit/s": 1e3**power / 8 for power, prefix in enumerate("kMGT", 1)
    }
    WORD: ClassVar = "a bandwidth"
    EXAMPLES: ClassVar = '"25 GB/s" or "200 Gbit/s"'
