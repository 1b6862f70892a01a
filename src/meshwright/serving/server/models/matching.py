"""Find a model's output tensors from batches of a few sizes, and match them to those of the deployment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from meshwright.serving.server.models.tensors import spec_of
from meshwright.spec import ServingError, TensorSpec

_SHOWN = 20

Named = list[tuple[str, torch.Tensor]]


def find_outputs(
    model: str, runs: Mapping[int, Named], given: Sequence[TensorSpec]
) -> tuple[tuple[TensorSpec, ...], list[int]]:
    """Return the specs of a sample's outputs, and their indices among the tensors that the model returned.

    ``runs`` has the returned tensors by batch size; ``given`` are the outputs that the deployment names, if any. Raises
    ServingError for a tensor whose first dim is not the batch, unless ``given`` leaves it out.
    """
    first = next(iter(runs.values()))
    names = [name for name, _ in first]
    if any([name for name, _ in run] != names for run in runs.values()):
        raise ServingError(
            f"Model {model!r} returns different tensors for different batch sizes. Return the same for all sizes."
        )
    found, strays = dict[int, TensorSpec](), list[str]()
    for place, name in enumerate(names):
        shapes = {count: tuple(run[place][1].shape) for count, run in runs.items()}
        if not any(shapes.values()):
            continue  # without dims, such as a loss
        if len({shape[1:] for shape in shapes.values()}) == 1 and all(
            shape[:1] == (count,) for count, shape in shapes.items()
        ):
            found[place] = spec_of(name, first[place][1])
        else:
            strays.append(f"{name} {', '.join(str(list(shape)) for shape in shapes.values())}")
    places, specs = list(found), tuple(found.values())
    if given:
        return tuple(given), [places[at] for at in match_specs(model, "outputs", given, specs)]
    if strays or not found:
        raise ServingError(
            f"Model {model!r}, for batches of {', '.join(map(str, runs))}, returned "
            f"{'; '.join(strays[:_SHOWN]) or 'no tensor with dims'}; expected tensors whose first dim is the batch, "
            "and whose other dims are constant. Change the model, name the wanted tensors in the deployment's "
            "`outputs`, or choose them with postprocess."
        )
    return specs, places


def match_specs(model: str, what: str, given: Sequence[TensorSpec], found: Sequence[TensorSpec]) -> list[int]:
    """Return the index of each given spec among the found specs: by name, or by position if no name is found.

    ``what`` is ``inputs`` or ``outputs``, for messages. Raises ServingError if specs cannot be matched, and if
    datatypes or shapes differ.
    """
    places = {item.name: place for place, item in enumerate(found)}
    if all(item.name in places for item in given):
        order = [places[item.name] for item in given]
    else:
        named = any(item.name in places for item in given)
        order = [] if named or len(given) != len(found) else list(range(len(found)))
    if not order or any(
        (item.datatype, item.shape) != (found[place].datatype, found[place].shape)
        for item, place in zip(given, order, strict=True)
    ):
        raise ServingError(
            f"Model {model!r} has the {what} {_describe(found)}; the deployment says {_describe(given)}. Use the "
            "model's names, or your own names for all of them in the model's order, with its datatypes and shapes."
        )
    return order


def _describe(specs: Sequence[TensorSpec]) -> str:
    shown = [f"{item.name} {item.datatype} {list(item.shape)}" for item in specs[:_SHOWN]]
    return ", ".join(shown) + (", ..." if len(specs) > _SHOWN else "")
