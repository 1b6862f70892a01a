"""Units: SI base units internally, readable units in output; quantities read with their units (`Seconds`, `Bytes`).

Simulated time is int64 picoseconds, so that comparisons are exact. Other times are float seconds; bytes and
floating-point operations are whole numbers.
"""

from __future__ import annotations

import math
import re
from typing import Any, ClassVar, Self

from meshwright.spec.errors import MeasurementError, suggest

_TEXT = re.compile(r"\s*([+-]?[0-9.]+(?:e[+-]?[0-9]+)?)\s*([^\s0-9.].*?)?\s*", re.IGNORECASE)
_BYTES = {
    "B": 1.0,
    **{f"{prefix}B": 1e3**power for power, prefix in enumerate("kMGTP", 1)},
    **{f"{prefix}iB": 1024.0**power for power, prefix in enumerate("KMGTP", 1)},
}


# Texts are such as ``"8 h"``, ``"25 GB/s"``, ``"80 GiB"``; inside they are SI floats. A number without a unit is
# refused: hours could be taken for seconds.
class _Quantity(float):
    """A number with a unit, not negative; ``UNITS`` are the factors to the first unit, in which it is kept."""

    UNITS: ClassVar[dict[str, float]] = {}
    WORD: ClassVar[str] = ""
    EXAMPLES: ClassVar[str] = ""

    def encode_scalar(self) -> str:
        """Return a text that parses to the same number: ``0.25 s``."""
        number = repr(float(self)).removesuffix(".0")
        return f"{number} {next(iter(self.UNITS))}"

    @classmethod
    def decode_scalar(cls, data: Any) -> Self:
        """Parse a text such as those in ``EXAMPLES``. Raises ValueError, whose message says what is expected."""
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
    """A time in seconds, read from a text with its unit: ``8 h``, ``250 us``."""

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
    """A number of bytes, read from a text with its unit: ``80 GiB``, ``500 GB``."""

    UNITS: ClassVar = _BYTES
    WORD: ClassVar = "a number of bytes"
    EXAMPLES: ClassVar = '"80 GiB" or "500 GB"'


class BytesPerSecond(_Quantity):
    """A bandwidth in bytes per second, read from a text with its unit: ``25 GB/s``, ``200 Gbit/s``."""

    UNITS: ClassVar = {f"{unit}/s": factor for unit, factor in _BYTES.items()} | {
        f"{prefix}bit/s": 1e3**power / 8 for power, prefix in enumerate("kMGT", 1)
    }
    WORD: ClassVar = "a bandwidth"
    EXAMPLES: ClassVar = '"25 GB/s" or "200 Gbit/s"'


PICOSECONDS_PER_SECOND = 1_000_000_000_000
# A quarter of the int64 range, so that a few such times can be added.
MOST_PICOSECONDS = 2**61

# Bytes of one element, by dtype name as torch prints it.
DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

FLOAT_DTYPES = frozenset({"float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"})
# Bytes of a factor, by the type in which products are computed. TF32 is stored as float32.
ARITHMETIC_BYTES = {**{name: DTYPE_BYTES[name] for name in FLOAT_DTYPES}, "tf32": DTYPE_BYTES["float32"]}


def to_picoseconds(seconds: float) -> int:
    """Return seconds as whole picoseconds, rounded. Raises MeasurementError for a time too long for a simulation."""
    picoseconds = seconds * PICOSECONDS_PER_SECOND
    if not abs(picoseconds) < MOST_PICOSECONDS:
        raise MeasurementError(
            f"A time of {seconds:g} s is longer than a simulation can hold ({to_seconds(MOST_PICOSECONDS):.0f} s). "
            "Correct the rates and links of the cluster, or measure again."
        )
    return round(picoseconds)


def to_seconds(picoseconds: float) -> float:
    """Return picoseconds as float seconds."""
    return picoseconds / PICOSECONDS_PER_SECOND


def format_count(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun: ``1 stage``, ``3 stages``. ``plural`` is given where it is not noun + s."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def format_seconds(seconds: float) -> str:
    """Return a time with three significant digits and a suitable unit: ``1.24 ms``."""
    return _format(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))) if seconds else "0 s"


def format_percent(share: float, digits: int = 1) -> str:
    """Return a share as a percentage with ``digits`` decimals: ``12.3 %`` for 0.123."""
    return f"{100 * share:.{digits}f} %"


def format_bytes(num_bytes: float) -> str:
    """Return bytes with three significant digits and a binary unit: ``1.5 GiB``."""
    return _format(num_bytes, ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")))


def format_money(amount: float) -> str:
    """Return an amount with three significant digits, from 1000 on as a whole number; the caller adds the currency."""
    return f"{amount:,.0f}" if amount >= 1000 else f"{amount:.3g}"


def format_flops(flops: float) -> str:
    """Return floating-point operations with three significant digits and a unit: ``2.1 TFLOP``."""
    return _format(flops, ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1, "FLOP")))


def _format(value: float, units: tuple[tuple[float, str], ...]) -> str:
    """Three significant digits, or all those before the point, in the largest unit not above the value."""
    factor, unit = next((pair for pair in units if abs(value) >= pair[0]), units[-1])
    number = value / factor
    # ".3g" would write 1023 as 1.02e+03.
    return f"{number:.0f} {unit}" if abs(number) >= 999.5 else f"{number:.3g} {unit}"
