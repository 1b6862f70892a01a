"""A file that says which part of a graph runs where: a plan, or a placement."""

from __future__ import annotations

from pathlib import Path

from meshwright.spec.codec import decode_document, document_kind
from meshwright.spec.parsing import read_data
from meshwright.spec.placement import Placement
from meshwright.spec.plan import Plan


def read_plan(path: Path | str) -> Plan | Placement:
    """Read a plan or a placement; DocumentError names file, place and remedy for everything else."""
    data = read_data(Path(path))
    if document_kind(data) == "placement":
        return decode_document(Placement, data, str(path))
    return decode_document(Plan, data, str(path))
