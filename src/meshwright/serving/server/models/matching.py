"""Which tensors a model gives, found from batches of a few sizes, and which of them a deployment means."""

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
    """Specs of a sample's outputs, and their places among the tensors of each of the runs, by their batch's size.

    Raises ServingError for a tensor that does not follow the batch, unless ``given`` ones leave it out.
    """
    first = next(iter(runs.values()))
    names = [name for name, _ in first]
    if any([name for name, _ in run] != names for run in runs.values()):
        raise ServingError(
            f"Model {model!r} returns other tensors for other sizes of the batch. Return the same for all of them."
        )
    found, strays = dict[int, TensorSpec](), list[str]()
    for place, name in enumerate(names):
        shapes = {count: tuple(run[place][1].shape) for count, run in runs.items()}
        if not any(shapes.values()):
            continue  # without dims, as a loss
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
            "and whose others are always the same. Change the model, name the outputs that are wanted, or choose them "
            "with postprocess."
        )
    return specs, places


def match_specs(model: str, what: str, given: Sequence[TensorSpec], found: Sequence[TensorSpec]) -> list[int]:
    """Place of each given one among those found: that of its name, or its own place if none of the names is known.

    Raises ServingError for others, and where datatypes or shapes differ.
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
            f"Model {model!r} has the {what} {_describe(found)}; the deployment says {_describe(given)}. Give each "
            "by the model's own name, or all in this order with other names, with these datatypes and shapes."
        )
    return order


def _describe(specs: Sequence[TensorSpec]) -> str:
    shown = [f"{item.name} {item.datatype} {list(item.shape)}" for item in specs[:_SHOWN]]
    return ", ".join(shown) + (", ..." if len(specs) > _SHOWN else "")
