"""Measurement tables of many devices (`Records`): their files, and imports of other tools' files."""

from meshwright.records.importing import Imported, import_file
from meshwright.records.one_device import from_measurements, to_measurements
from meshwright.records.record_table import (
    COLUMNS,
    IDENTITY,
    Records,
    concat_records,
    keep_sound,
    make_records,
    merge_records,
    named_shapes,
)
from meshwright.records.text_files import (
    add_records,
    check_table_place,
    load_measurements,
    read_records_at,
    save_measurements,
)

__all__ = [
    "COLUMNS",
    "IDENTITY",
    "Imported",
    "Records",
    "add_records",
    "check_table_place",
    "concat_records",
    "from_measurements",
    "import_file",
    "keep_sound",
    "load_measurements",
    "make_records",
    "merge_records",
    "named_shapes",
    "read_records_at",
    "save_measurements",
    "to_measurements",
]
