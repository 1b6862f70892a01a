"""Workers and parameter servers that train a module under a controller (`Replica`)."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from meshwright.runtime.controlled.streams import Abandoned, Dispatched
from meshwright.spec import AllReduce, Backward, Forward, OptimizerStep, ProgramError, Send


class Replica:
    """A copy of a module, as a worker, a parameter server, or one of equal replicas.

    A forward computes ``loss_of(module, microbatch)``, a scalar, on the parameters that arrived for it, if any. An
    update steps the optimizer with the mean of the gradients that arrived for it, else with the reduced gradient. All
    parameters, and so all gradients, are float32 and sent as one vector, of `num_bytes`. Raises ProgramError for other
    parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        loss_of: Callable[[nn.Module, int], torch.Tensor],
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if odd := {parameter.dtype for parameter in self._parameters} - {torch.float32}:
            raise ProgramError(f"The module has parameters of {sorted(map(str, odd))}; expected float32.")
        self.module, self._loss_of, self._optimizer = module, loss_of, make_optimizer(self._parameters)
        self._loss: torch.Tensor | None = None
        self._gradients: dict[int, torch.Tensor] = {}
        self._reduced: torch.Tensor | None = None
        # The parameters that a server sends are those of one version.
        self._lock = threading.Lock()
        self._work: Dispatched | None = None
        for submodule in module.modules():
            submodule.register_forward_pre_hook(lambda *_: self._check())
        for parameter in self._parameters:
            parameter.register_hook(lambda _: self._check())

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters that are trained."""
        return 4 * sum(parameter.numel() for parameter in self._parameters)

    def compute(self, work: Dispatched) -> None:
        """Execute a forward, a backward or an update."""
        self._work = work
        match work.instruction:
            case Forward(microbatch=microbatch):
                for _, vector in work.arrived:
                    self._set(vector)
                self._loss = None
                self._loss = self._loss_of(self.module, microbatch)
            case Backward(microbatch=microbatch):
                if self._loss is None:  # its forward was abandoned
                    raise Abandoned
                loss, self._loss = self._loss, None
                self._gradients[microbatch] = torch.cat(
                    [gradient.reshape(-1) for gradient in torch.autograd.grad(loss, self._parameters)]
                )
            case OptimizerStep():
                arrived = [vector for _, vector in work.arrived]
                self._step(torch.stack(arrived).mean(0) if arrived else self._reduced)
            case _:
                raise ProgramError(
                    f"{work.instruction} is unknown to a replica; expected forwards, backwards, updates."
                )

    def outgoing(self, send: Send) -> torch.Tensor:
        """Return the gradient of the microbatch, shape (N,), or a copy of the parameters, shape (N,)."""
        if send.payload == "gradient":
            return self._gradients.pop(send.microbatch)
        with self._lock:
            return parameters_to_vector(self._parameters).detach().clone()

    def summand(self, instruction: AllReduce) -> torch.Tensor:  # noqa: ARG002 - there is one bucket
        """Return the gradient of the last backward, shape (N,)."""
        _, gradient = self._gradients.popitem()
        return gradient

    def summed(self, instruction: AllReduce, total: torch.Tensor, num_ranks: int) -> None:  # noqa: ARG002
        """Keep the mean gradient, shape (N,), for the next update."""
        self._reduced = total / num_ranks

    def _check(self) -> None:
        if self._work is not None:
            self._work.check()

    def _set(self, vector: torch.Tensor) -> None:
        with torch.no_grad():
            vector_to_parameters(vector, self._parameters)

    def _step(self, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            raise ProgramError("An update was issued that waits for no gradient. Let it wait for sends or a sum.")
        sizes = [parameter.numel() for parameter in self._parameters]
        with self._lock:
            for parameter, part in zip(self._parameters, gradient.split(sizes), strict=True):
                parameter.grad = part.view_as(parameter)
            self._optimizer.step()
