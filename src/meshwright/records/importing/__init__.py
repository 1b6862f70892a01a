"""Read files of other tools as rows of the measurement table (`import_file`); the content decides a file's kind."""

from meshwright.records.importing.imported import Imported
from meshwright.records.importing.read_records import import_file

__all__ = ["Imported", "import_file"]
