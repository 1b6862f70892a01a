"""A check that numbers of a document lie within their bounds (`check_bounds`)."""

from __future__ import annotations

from meshwright.spec.errors import MeshwrightError

# Bounds from here on are mentioned only if they are exceeded.
_MOST = 1e9


def check_bounds(error: type[MeshwrightError], what: str, **bounds_of: tuple[float, float | None, float]) -> None:
    """Raise ``error`` unless least <= value <= most for each keyword argument ``name=(least, value, most)``.

    A value of None is not checked. Messages begin with ``what``, the object that has the values.
    """
    for name, (least, value, most) in bounds_of.items():
        if value is not None and not least <= value <= most:
            expected = f"{least:g} to {most:g}" if most < _MOST or value > most else f"at least {least:g}"
            raise error(f"{what}: {name} is {value:g}; expected {expected}.")
