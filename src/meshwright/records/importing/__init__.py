"""Files of other tools as rows of the measurement table: what a file is, is told by its content."""

from meshwright.records.importing.imported import Imported
from meshwright.records.importing.read import import_file

__all__ = ["Imported", "import_file"]
