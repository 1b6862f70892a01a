"""Import files of other tools into the measurement table; the content of a file decides its kind."""

from meshwright.records.importing.imported import Imported
from meshwright.records.importing.read_records import import_file

__all__ = ["Imported", "import_file"]
