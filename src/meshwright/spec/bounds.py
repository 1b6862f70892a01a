"""Bounds of the numbers of a document, and how one that leaves them is refused."""

from __future__ import annotations

from meshwright.spec.errors import MeshwrightError

# Bounds from here on are not told, unless they were left.
_MOST = 1e9


def check_bounds(error: type[MeshwrightError], what: str, **bounds_of: tuple[float, float | None, float]) -> None:
    """Raise ``error`` unless each value is within its bounds: name = (least, value, most); None is none given."""
    for name, (least, value, most) in bounds_of.items():
        if value is not None and not least <= value <= most:
            expected = f"{least:g} to {most:g}" if most < _MOST or value > most else f"at least {least:g}"
            raise error(f"{what}: {name} is {value:g}; expected {expected}.")
