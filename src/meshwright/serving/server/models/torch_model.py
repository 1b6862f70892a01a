"""A torch model for a server: it is loaded, tried with batches of a few sizes, and then run on batches of any size.

The tensors of a sample are found by trying: inputs from an example, outputs from batches of 1, 2 and 3 samples. A
tensor whose first dim is always the batch size is an output; a tensor without dims (a loss) is ignored; any other
tensor is refused, unless the deployment names the wanted outputs.

A sample that a model cannot compute, such as a token beyond its vocabulary, raises an exception on a CPU. On a GPU an
assertion fails, after which the process can no longer use the device: DeviceLost is raised, and the worker must be
restarted. To serve untrusted tokens on a GPU, check them in `preprocess`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from meshwright.serving.server.models.hooks import load_hook
from meshwright.serving.server.models.matching import Named, find_outputs, match_specs
from meshwright.serving.server.models.runnable import LARGEST, Arrays, DeviceLost
from meshwright.serving.server.models.sources import load_source, zeros_of
from meshwright.serving.server.models.tensors import as_arguments, named_tensors, spec_of, to_array, to_tensor
from meshwright.spec import ServedModel, ServingError, TensorSpec, own_code
from meshwright.spec.own_code import afresh, folder_at

_TRIED = (1, 2, 3)


class TorchModel:
    """A torch model for a server, tried with batches of a few sizes when it is loaded (a `Runnable`)."""

    def __init__(self, model: ServedModel, device: str = "cpu", num_threads: int = 1) -> None:
        """Load and try the model on ``cpu`` or ``cuda:0``; operators use ``num_threads`` threads.

        Raises ServingError if it cannot be served, and the errors of reading its reference.
        """
        torch.set_num_threads(num_threads)
        self._name = model.name
        self._device = _find_device(device)
        self._path = (own_code.split_reference(model.model or "") or (Path(model.model or ""), ""))[0]
        with afresh():
            self._load(model)

    def _load(self, model: ServedModel) -> None:
        source = load_source(model, self._device)
        self._folder = folder_at(self._path.parent)
        most = LARGEST if model.latency is None else model.latency.largest
        self.platform, self.largest = source.platform, int(min(most, source.largest))
        self._call, self._fixed = source.call, source.fixed
        self._before = load_hook(model.preprocess, "makes the model's arguments of a dict of tensors")
        self._after = load_hook(model.postprocess, "makes tensors of what the model returns")
        self._arguments = None if self._before is not None else source.arguments
        self.inputs = self._find_inputs(model)
        examples = zeros_of(self.inputs, 1) if self._arguments is None else self._arguments.examples
        self._samples = [to_array(item) for item in examples]
        runs = {count: self._try(model, count) for count in ((self._fixed,) if self._fixed else _TRIED)}
        self.outputs, self._places = find_outputs(model.name, runs, model.outputs)

    def run(self, arrays: Arrays) -> Arrays:
        """See `Runnable.run`."""
        found = self._compute(arrays)
        count = len(arrays[0])
        # Without padding, all rows are kept.
        rows = slice(count if self._fixed else None)
        return [to_array(found[place][1][rows]) for place in self._places]

    def sample(self, count: int) -> Arrays:
        """Return samples of the model's example, repeated as needed; zeros without an example."""
        return [array[np.arange(count) % len(array)] for array in self._samples]

    def _compute(self, arrays: Arrays) -> Named:
        """Return the tensors of the model's result; the batch is padded if the model runs only one size."""
        if self._fixed:
            fill = self._fixed - len(arrays[0])
            arrays = [np.concatenate([array, np.repeat(array[-1:], fill, axis=0)]) for array in arrays]
        with self._losing(), self._folder.importable(), torch.inference_mode():
            tensors = [
                to_tensor(array, item.datatype).to(self._device)
                for array, item in zip(arrays, self.inputs, strict=True)
            ]
            if self._before is not None:
                named = {item.name: tensor for item, tensor in zip(self.inputs, tensors, strict=True)}
                args, kwargs = as_arguments(self._before(named))
            elif self._arguments is not None:
                args, kwargs = self._arguments.fill(tensors)
            else:
                args, kwargs = tuple(tensors), {}
            outputs = self._call(*args, **kwargs)
            if self._after is not None:
                outputs = self._after(outputs)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # raises errors of this batch here
        return list(named_tensors(outputs))

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        """Raise DeviceLost for exceptions that mean the loss of the device; pass others on."""
        try:
            yield
        except Exception as error:
            if any(isinstance(item, torch.AcceleratorError) for item in (error, error.__cause__)):
                raise DeviceLost(f"{self._device}: {' '.join(str(error).split())[:200]}") from error
            raise

    def _find_inputs(self, model: ServedModel) -> tuple[TensorSpec, ...]:
        """Return the example's inputs, with the deployment's names; the deployment's own without an example."""
        if self._arguments is None:
            return model.inputs
        names, examples = self._arguments.names, self._arguments.examples
        if len({len(tensor) for tensor in examples}) != 1:
            sizes = ", ".join(f"{name} {len(tensor)}" for name, tensor in zip(names, examples, strict=True))
            raise ServingError(
                f"Model {model.name!r}: first dims of its inputs are {sizes or 'none'}; expected one size, the batch, "
                "for all of them. Return example inputs of this form."
            )
        found = tuple(map(spec_of, names, examples))
        if not model.inputs:
            return found
        order = match_specs(model.name, "inputs", model.inputs, found)
        if sorted(order) != list(range(len(found))):
            raise ServingError(
                f"Model {model.name!r} takes {', '.join(names)}; the deployment's inputs are only "
                f"{', '.join(item.name for item in model.inputs)}. Give all, or let preprocess make the others."
            )
        self._arguments.reorder(order)
        return model.inputs

    def _try(self, model: ServedModel, count: int) -> Named:
        told = f"Model {model.name!r}, run on a batch of {count}, raised"
        with own_code.reported(self._path, told, ServingError):
            return self._compute(self.sample(count))


def _find_device(device: str) -> torch.device:
    here = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    chosen = "cuda:0" if device == "cuda" else device
    if chosen not in here:
        raise ServingError(f"The device is {device!r}, but torch sees only {', '.join(here)}. Give one of these.")
    return torch.device(chosen)
