"""The one measurement table of many devices, and what is read into it."""

from meshwright.records.table import (
    COLUMNS,
    IDENTITY,
    Records,
    concat_records,
    keep_sound,
    make_records,
    named_shapes,
)

__all__ = [
    "COLUMNS",
    "IDENTITY",
    "Records",
    "concat_records",
    "keep_sound",
    "make_records",
    "named_shapes",
]
