"""The measurements (path and hash) and software with which a plan was made, to estimate it the same way later."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import ClassVar, NamedTuple

from meshwright.spec.errors import DocumentError
from meshwright.spec.own_code import source_hash


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeWith:
    """The inputs of a plan's cost estimate at the time when the plan was written.

    ``measurements`` is the path of the measurement table, relative to the plan's folder; empty without a table.
    ``measurements_hash`` is the hash of that file. ``software`` names versions: ``meshwright 0.1.0, torch 2.13.0``.
    ``predicted_for`` is the training software whose speed was estimated (``megatron@2022``); empty for Meshwright's own
    runtime.
    """

    # Keys of older files.
    RENAMED_KEYS: ClassVar = {"priced_for": "predicted_for"}

    measurements: str = ""
    measurements_hash: str = ""
    software: str = ""
    predicted_for: str = ""


UNKNOWN = MadeWith()


class Recalled(NamedTuple):
    """The result of `recall`: path of the measurement table (None without one), and a remark for the user, or ""."""

    measurements: Path | None
    remark: str = ""


def note_making(measurements: Path | None, plan_file: Path, predicted_for: str | None = None) -> MadeWith:
    """Return the record for a plan that is about to be written to ``plan_file``.

    ``measurements`` is the table of its costs. Raises DocumentError if the table cannot be read.
    """
    software = own_software()
    if measurements is None:
        return MadeWith(software=software, predicted_for=predicted_for or "")
    place = os.path.relpath(measurements.resolve(), plan_file.resolve().parent)
    return MadeWith(
        measurements=Path(place).as_posix(),
        measurements_hash=_hash_of(measurements),
        software=software,
        predicted_for=predicted_for or "",
    )


def recall(made_with: MadeWith, plan_file: Path, given: Path | None = None) -> Recalled:
    """Return the measurement table with which to estimate a plan that was read from ``plan_file``.

    It is the ``given`` one, else the one in the plan's record ``made_with``. The remark mentions which table is used,
    whether it is missing or has changed, and other versions of the software. Raises DocumentError if a table cannot be
    read.
    """
    found = _recall_table(made_with, plan_file) if given is None else _compare_given(made_with, given)
    here = own_software()
    if made_with.software in ("", here):
        return found
    other = f"The plan was made with {made_with.software}; installed here: {here}."
    return found._replace(remark=f"{found.remark} {other}".strip())


def _recall_table(made_with: MadeWith, plan_file: Path) -> Recalled:
    if not made_with.measurements:
        return Recalled(None)
    found = Path(os.path.normpath(plan_file.resolve().parent / made_with.measurements))
    shown = Path(os.path.relpath(found)) if found.is_relative_to(Path.cwd()) else found
    if not found.is_file():
        return Recalled(
            None,
            f"The plan was made with {shown}, which is missing: costs are estimated from datasheets. Give the table "
            "by --measurements.",
        )
    if _hash_of(found) != made_with.measurements_hash:
        return Recalled(
            found, f"{shown}, with which the plan was made, has changed since; costs are those of the changed table."
        )
    return Recalled(found, f"Costs are those of {shown}, with which the plan was made.")


def _compare_given(made_with: MadeWith, given: Path) -> Recalled:
    if not made_with.measurements or _hash_of(given) == made_with.measurements_hash:
        return Recalled(given)
    return Recalled(given, f"The plan was made with another measurement table than {given}.")


def own_software() -> str:
    """Return the installed versions of meshwright and torch: ``meshwright 0.1.0, torch 2.13.0``."""
    found = []
    for name in ("meshwright", "torch"):
        try:
            found.append(f"{name} {metadata.version(name).partition('+')[0]}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def _hash_of(path: Path) -> str:
    try:
        return source_hash(path.read_bytes())
    except OSError as error:
        raise DocumentError(f"{path}: cannot be read ({error.strerror}). Check the path and the permissions.") from None
