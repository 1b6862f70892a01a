"""Measurements (path and hash) and software with which a plan was made, so that it is estimated the same way later."""

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
    """The inputs of a plan's estimate when it was written.

    ``measurements`` is the path of the table, relative to the plan's folder, or empty; ``measurements_hash`` is that
    file's hash. ``software`` names versions: ``meshwright 0.1.0, torch 2.13.0``. ``predicted_for`` is the training
    software that was estimated (``megatron@2022``), empty for this package's runtime.
    """

    # Keys of older files.
    RENAMED_KEYS: ClassVar = {"priced_for": "predicted_for"}

    measurements: str = ""
    measurements_hash: str = ""
    software: str = ""
    predicted_for: str = ""


UNKNOWN = MadeWith()


class Recalled(NamedTuple):
    """The table with which a plan was made, if it exists, and a remark for the user."""

    measurements: Path | None
    remark: str = ""


def note_making(measurements: Path | None, plan_file: Path, predicted_for: str | None = None) -> MadeWith:
    """Record the inputs of a plan that is about to be written."""
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
    """Return the measurements of a plan that was read from a file, or the ``given`` ones instead.

    Raises DocumentError if they cannot be read.
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
            f"The plan was made with {shown}, which is missing: costs are those of datasheets. Give the table by "
            "--measurements.",
        )
    if _hash_of(found) != made_with.measurements_hash:
        return Recalled(found, f"{shown}, which the plan was made with, has changed since; costs are those of now.")
    return Recalled(found, f"Estimated with {shown}, as the plan was made.")


def _compare_given(made_with: MadeWith, given: Path) -> Recalled:
    if not made_with.measurements or _hash_of(given) == made_with.measurements_hash:
        return Recalled(given)
    return Recalled(given, f"The plan was made with another table than {given}.")


def own_software() -> str:
    """Return the installed versions of the packages that matter to a plan."""
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
