"""A batch of requests from slabs: inputs are gathered, the model runs, outputs are scattered.

If the model raises an exception, the batch is halved until the samples that cause it are found: for k of b samples this
takes about k log b runs of ever smaller batches. The other samples are answered as usual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.serving.datatypes import NUMPY_TYPES
from meshwright.serving.policies.pool import Ints
from meshwright.serving.server.models.runnable import RAISED, Arrays, DeviceLost, Runnable
from meshwright.serving.server.slabs import Slab
from meshwright.spec import ServingError

# A slab and slots in it.
Group = tuple[Slab, Ints]
_LONGEST_MESSAGE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFailures:
    """The samples of a batch that have no answer: their indices, ascending, and the error of the first one."""

    places: tuple[int, ...] = ()
    error: str = ""


def run_batch(model: Runnable, groups: Sequence[Group]) -> SampleFailures:
    """Compute a batch whose samples are in slots of one or several slabs, and write the outputs there.

    Indices of failed samples count through all groups; their slots are unchanged. Exceptions of the model are caught,
    except DeviceLost.
    """
    failed: list[tuple[int, str]] = []
    _run_part(model, groups, 0, failed)
    return SampleFailures(places=tuple(place for place, _ in failed), error=failed[0][1] if failed else "")


def gather(groups: Sequence[Group]) -> Arrays:
    """Return the inputs of a batch, copied to arrays of shape (batch, *shape of a sample's tensor)."""
    if len(groups) == 1:
        slab, slots = groups[0]
        return [column[slots] for column in slab.inputs]
    columns = zip(*(slab.inputs for slab, _ in groups), strict=True)
    return [
        np.concatenate([column[slots] for column, (_, slots) in zip(of_slabs, groups, strict=True)])
        for of_slabs in columns
    ]


def scatter(groups: Sequence[Group], outputs: Arrays) -> None:
    """Write the outputs of a batch into the slots of its samples."""
    begin = 0
    for slab, slots in groups:
        end = begin + len(slots)
        for column, output in zip(slab.outputs, outputs, strict=True):
            column[slots] = output[begin:end]
        begin = end


def _run_part(model: Runnable, groups: Sequence[Group], first: int, failed: list[tuple[int, str]]) -> None:
    """Run the part of a batch that starts at place ``first``; append places that failed, and why, to ``failed``."""
    count = sum(len(slots) for _, slots in groups)
    arrays = gather(groups)
    try:
        answers = model.run(arrays)
        check_answers(model, answers, count)
    except DeviceLost:
        raise
    except RAISED as error:
        if count == 1:
            failed.append((first, " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_MESSAGE]))
            return
        middle = count // 2
        _run_part(model, _take(groups, 0, middle), first, failed)
        _run_part(model, _take(groups, middle, count), first + middle, failed)
        return
    scatter(groups, answers)


def _take(groups: Sequence[Group], begin: int, end: int) -> list[Group]:
    """Return the groups of the samples from place ``begin`` to ``end``."""
    taken: list[Group] = []
    for slab, slots in groups:
        part = slots[max(begin, 0) : max(end, 0)]
        if len(part):
            taken.append((slab, part))
        begin, end = begin - len(slots), end - len(slots)
    return taken


def check_answers(model: Runnable, answers: Arrays, count: int) -> None:
    """Raise ServingError unless the outputs of a batch have the shapes and types that the model has declared."""
    promised = [((count, *item.shape), np.dtype(NUMPY_TYPES[item.datatype])) for item in model.outputs]
    given = [(answer.shape, answer.dtype) for answer in answers]
    if given != promised:
        raise ServingError(
            f"The model returned {_describe(given)}; expected {_describe(promised)}, as when it was loaded and tried. "
            "Serve a model whose output shapes do not depend on values."
        )


def _describe(arrays: list[tuple[tuple[int, ...], np.dtype]]) -> str:
    return ", ".join(f"{dtype.name} {list(shape)}" for shape, dtype in arrays) or "nothing"
