"""Bounds of the numbers of a document, and the error for a number outside of them."""

from __future__ import annotations

from meshwright.spec.errors import MeshwrightError

# Bounds from here on are mentioned only if they are exceeded.
_MOST = 1e9


def check_bounds(error: type[MeshwrightError], what: str, **bounds_of: tuple[float, float | None, float]) -> None:
    """Raise ``error`` unless each value is within its bounds: name = (least, value, most); None passes."""
    for name, (least, value, most) in bounds_of.items():
        if value is not None and not least <= value <= most:
            expected = f"{least:g} to {most:g}" if most < _MOST or value > most else f"at least {least:g}"
            raise error(f"{what}: {name} is {value:g}; expected {expected}.")
