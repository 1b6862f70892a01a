"""Merge a new measurement table into an old one: new rows replace old rows of the same measurement."""

from __future__ import annotations

from dataclasses import replace

from meshwright.spec import MeasurementError, Measurements

# The prefix of the conditions of timing whole models; others apply to the rest of a table.
BATCH_CONDITIONS = "batches of "
_SEPARATOR = "; "


def merge_measurements(old: Measurements, new: Measurements) -> Measurements:
    """Return a table with the rows of both; if both have the same row, that of ``new`` is used.

    The result has the conditions (a text) of ``new``, and the conditions of batches of whole models from both tables.
    If ``new`` contains only batches of whole models, the other conditions of ``old`` are kept. Raises MeasurementError
    for tables of different devices.
    """
    if old.device != new.device:
        raise MeasurementError(
            f"The tables are for devices {old.device!r} and {new.device!r}, but one table contains one kind of device. "
            "Keep the tables in two files."
        )
    return replace(
        new,
        conditions=_merge_conditions(old, new),
        ops=tuple({row.key: row for row in (*old.ops, *new.ops)}.values()),
        optimizers=tuple(
            {
                (row.kind, row.dtype, row.num_elements, row.num_tensors): row
                for row in (*old.optimizers, *new.optimizers)
            }.values()
        ),
        transfers=tuple(
            {(row.kind, row.num_ranks, row.num_bytes): row for row in (*old.transfers, *new.transfers)}.values()
        ),
        overhead_s=new.overhead_s or old.overhead_s,
        host_call_s=new.host_call_s or old.host_call_s,
        batches=tuple({(row.model, row.batch_size): row for row in (*old.batches, *new.batches)}.values()),
    )


def _merge_conditions(old: Measurements, new: Measurements) -> str:
    known, added = ([part for part in table.conditions.split(_SEPARATOR) if part] for table in (old, new))
    if not new.batches or new.ops or new.optimizers or new.transfers:
        known = [part for part in known if part.startswith(BATCH_CONDITIONS)]
        return _SEPARATOR.join(dict.fromkeys((*added, *known)))
    return _SEPARATOR.join(dict.fromkeys((*known, *added)))
