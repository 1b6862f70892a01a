"""Read cells of a table of training steps: whole numbers and known words; anything else is an error.

An unknown word is an error, because a guess would score the prediction of another run. Known words are those of the
public rows (``data/training_steps.csv``) and the names of the settings that they mean. Case and surrounding blanks do
not matter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from meshwright.cost.software import DATE, known_software
from meshwright.spec import MeasurementError

if TYPE_CHECKING:
    from meshwright.templates.shapes import Precision, Recompute, Schedule, ZeroStage

Row = Mapping[str, str]
Meaning = TypeVar("Meaning")
PRECISIONS: dict[str, Precision] = {
    "": "fp16",
    "fp16": "fp16",
    "fp16 mixed": "fp16",
    "amp_fp16": "fp16",
    "mixed (megatron-lm)": "fp16",
    "bf16": "bf16",
    "bf16 mixed": "bf16",
    "bf16/pure": "bf16",
    "amp_bf16": "bf16",
    "fp8": "fp8",
    "amp_fp8": "fp8",
    "float8": "fp8",
    "float8 tensorwise": "fp8",
    "float8 rowwise": "fp8",
    "fp32": "fp32",
}
RECOMPUTES: dict[str, Recompute] = {
    "": "none",
    "none": "none",
    "none stated": "none",
    "selective": "selective",
    "op": "op",
    "selective (op)": "op",
    "torchtitan default (selective)": "op",
    "full": "full",
}
# vTrain's rows refer to its repository, whose runs shard nothing.
SHARDINGS: dict[str, ZeroStage] = {
    "": 0,
    "none": 0,
    "see repo": 0,
    "no_shard": 0,
    "zero-1": 1,
    "distributed optimizer (zero-1)": 1,
    "zero-2 (once per step)": 1,
    "zero-2": 2,
    "shard_grad_op": 2,
    "zero-3": 3,
    "full_shard": 3,
    "fsdp2 (zero-3)": 3,
    "hsdp": 3,
    "hsdp (zero-3)": 3,
    "hybrid_shard": 3,
    "_hybrid_shard_zero2": 2,
    # Alpa reduces gradients once per step, and its passes put reduce-scatter and all-gather for all-reduce.
    "auto-sharding": 1,
}
# In these the replicas of a node shard states among each other.
HYBRID = frozenset({"hsdp", "hsdp (zero-3)", "hybrid_shard", "_hybrid_shard_zero2"})
# Nothing: whatever the number of chunks implies.
SCHEDULES: dict[str, Schedule | None] = {
    "": None,
    "n/a": None,
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved": "interleaved",
    "interleaved 1f1b": "interleaved",
    "interleaved 1f1b + scatter/gather (chunks not stated)": "interleaved",
    "interleaved 1f1b + scatter/gather (chunks per device not stated)": "interleaved",
    "1f1b-i": "interleaved",
    "zb-1p": "zb-1p",
    "zb-2p": "zb-2p",
}
# Words of the column ``features``: what software did, where framework and date do not decide it.
FEATURES = ("async tensor parallel", "fused loss", "untied", "no dropout", "Adafactor", "momentum", "16-bit gradients")
SWITCHES = {"": False, "0": False, "1": True}
MEASURED = {"": True, "measured": True}
UNSTATED = ("", "not stated")

_MAX_SHOWN = 40
# More than any model, machine and batch has: a typing error fails here, not in memory or after minutes.
_MOST = {"layers": 10_000, "pp": 1024, "vpp": 128, "devices_per_node": 1024, "ffn": 10**7, "vocab": 10**7, "seq": 10**7}
_MOST_OTHERWISE = 10**6


class CellError(MeasurementError):
    """A cell has an invalid value; the error has its ``column``, its text (``found``), and what was ``expected``."""

    def __init__(self, column: str, found: str, expected: str) -> None:
        self.column, self.found, self.expected = column, found, expected
        super().__init__(f"{column} is {show(found)}; expected {expected}")


def show(text: str) -> str:
    """Return the text of a cell in quotes, shortened for messages."""
    return repr(text) if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]!r}..."


def read_word(row: Row, column: str, meanings: Mapping[str, Meaning]) -> Meaning:
    """Return the meaning of a cell's word; a missing column counts as an empty cell.

    Raises CellError for a word that is not in ``meanings``.
    """
    text = row.get(column, "")
    word = text.strip().lower()
    if word not in meanings:
        raise CellError(column, text, f"one of {', '.join(name or 'nothing' for name in meanings)}")
    return meanings[word]


def read_features(row: Row) -> frozenset[str]:
    """Return the features that the cell ``features`` lists, separated by semicolons.

    Raises CellError for an unknown feature. Precision "pure" adds 16-bit gradients.
    """
    known = {feature.lower(): feature for feature in FEATURES}
    words = [word.strip().lower() for word in row.get("features", "").split(";")]
    unknown = next((word for word in words if word and word not in known), "")
    if unknown:
        raise CellError("features", unknown, f"words among {'; '.join(FEATURES)}")
    # Composer's precision PURE keeps and reduces gradients in 16 bits.
    pure = ["16-bit gradients"] if "pure" in row.get("precision", "").lower() else []
    return frozenset([*(known[word] for word in words if word), *pure])


def read_date(row: Row) -> str:
    """Return the year, or year and month, of the run's software; "" if it is not stated.

    Raises CellError for other text.
    """
    text = row.get("date", "").strip()
    if text and not re.fullmatch(DATE, text):
        raise CellError("date", text, "a year or a year and a month, such as 2024 or 2024-12")
    return text


def read_framework(row: Row) -> str:
    """Return the framework of a row; "" if it is not stated. Raises CellError for an unknown framework."""
    text, known = (
        row.get("framework", "").strip(),
        sorted({entry.framework for entry in known_software()} | {"pytorch"}),
    )
    if text and not text.lower().startswith(tuple(known)):
        raise CellError("framework", text, f"a name that begins with one of {', '.join(known)}")
    return text


def read_number(row: Row, column: str, otherwise: int | None = None) -> int:
    """Return the positive whole number in a cell; ``otherwise``, if given, for an empty cell.

    Raises CellError for other text and for numbers above the column's limit.
    """
    text = row.get(column, "").strip()
    if not text and otherwise is not None:
        return otherwise
    if not re.fullmatch(r"[1-9][0-9]{0,11}", text):
        raise CellError(column, row.get(column, ""), "a positive whole number of at most 12 digits")
    most = _MOST.get(column, _MOST_OTHERWISE)
    if int(text) > most:
        raise CellError(column, text, f"at most {most}")
    return int(text)


def read_seconds(row: Row, column: str, *, least_s: float, most_s: float) -> float | None:
    """Return the seconds in a cell; None for an empty cell. Raises CellError for values outside the bounds."""
    text = row.get(column, "").strip()
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not least_s <= seconds <= most_s:
        raise CellError(column, text, f"seconds from {least_s:g} to {most_s:g}")
    return seconds
