"""Open a deployment's model for a worker. Torch is loaded only for models that need it."""

from __future__ import annotations

import importlib

from meshwright.serving.server.models.emulated import EmulatedModel
from meshwright.serving.server.models.runnable import Runnable
from meshwright.spec import ServedModel, ServingError

INSTALL = "pip install 'meshwright[torch]'"


def open_model(model: ServedModel, device: str = "cpu", num_threads: int = 1) -> Runnable:
    """Load the model onto a device (``cpu``, ``cuda:0``), or return an `EmulatedModel` if it has no reference.

    Operators use ``num_threads`` threads. Raises ServingError, and the errors of reading the model's reference.
    """
    if model.model is None:
        return EmulatedModel(model)
    try:
        torch_model = importlib.import_module("meshwright.serving.server.models.torch_model")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ServingError(
            f"Model {model.name!r} is a torch model, and torch is not installed. Run {INSTALL}."
        ) from None
    opened: Runnable = torch_model.TorchModel(model, device, num_threads)
    return opened
