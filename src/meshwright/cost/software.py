"""Properties of training software that affect costs, in addition to graph and plan: its attention kernel and its host.

The default is this package's runtime on current PyTorch. ``software.toml`` lists the software of published runs, by
framework and date.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import ClassVar, Literal

from meshwright.spec import MeasurementError, decode_document, suggest
from meshwright.spec.parsing import read_data

# A year, or a year and a month.
DATE = r"20[0-9]{2}(-(0[1-9]|1[0-2]))?"
Attention = Literal["torch", "flash-2", "flash-1"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Training software of one framework, from the date ``since`` to that of the framework's next entry.

    The first entry of a framework is also used for older runs. ``attention``: the kernels of fused attention: "torch"
    for those that current PyTorch chooses, else a version of FlashAttention. ``balanced_context``: whether under
    context parallelism each rank has tokens of the beginning and of the end. ``host_factor``: time of the host to issue
    an op / that of plain PyTorch. ``fused_attention``: whether attention is fused; if not, scores are saved.
    ``overlap``: whether gradient reduction overlaps the backward. ``memory_share``: share (0..1) of a device's memory
    that the software uses. ``vocabulary_multiple``: vocabularies are padded to a multiple of this number on each device
    of a tensor-parallel group. The last four fields affect graph and plan of a published run.
    """

    framework: str
    since: str
    citation: str
    attention: Attention = "torch"
    balanced_context: bool = False
    host_factor: float = 1.0
    fused_attention: bool = True
    overlap: bool = True
    memory_share: float = 1.0
    vocabulary_multiple: int = 1

    @property
    def name(self) -> str:
        """Name of the software in the form "framework@date", which `read_software` accepts."""
        return f"{self.framework}@{self.since}"


PYTORCH = Software(framework="PyTorch", since="", citation="meshwright.runtime")


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareList:
    """The document ``software.toml``; the last of the entries that apply to a run is used."""

    software: tuple[Software, ...]

    SCHEMA_VERSION: ClassVar[int] = 1


def find_software(framework: str, date: str = "") -> Software:
    """Return the software of a run; `PYTORCH` for an unknown framework.

    ``framework``: text that starts with the name of a framework. ``date``: year or year-month of the run, such as
    "2022-05"; "" for the newest entry.
    """
    name, date = framework.strip().lower(), date or "9999"
    known = [entry for entry in known_software() if name.startswith(entry.framework)]
    fitting = [entry for entry in known if entry.since <= date] or known[:1]
    return fitting[-1] if fitting else PYTORCH


def read_software(text: str | None) -> Software:
    """Return the software for a text "framework" or "framework@date"; `PYTORCH` for None.

    Raises MeasurementError for an unknown framework or an invalid date.
    """
    if text is None:
        return PYTORCH
    framework, separator, date = text.partition("@")
    names = sorted({entry.framework for entry in known_software()})
    if framework.strip().lower() not in names:
        raise MeasurementError(
            f"The software {text!r} is unknown{suggest(framework, names)}; expected one of {', '.join(names)}, with or "
            "without a date, such as megatron@2022."
        )
    if separator and not re.fullmatch(DATE, date):
        raise MeasurementError(
            f"The date in the software {text!r} is not valid; expected a year or a year and a month after @, such as "
            "megatron@2022."
        )
    return find_software(framework, date)


@cache
def known_software() -> tuple[Software, ...]:
    """Return all entries of the shipped ``software.toml``."""
    with resources.as_file(resources.files("meshwright.cost") / "software.toml") as path:
        return decode_document(SoftwareList, read_data(path), path.name).software
