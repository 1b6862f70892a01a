"""Workers and parameter servers that train a module under a controller (`Replica`)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from meshwright.runtime.controlled.streams import DispatchedWork
from meshwright.spec import AllReduce, Backward, Forward, OptimizerStep, ProgramError, Send


class Replica:
    """A copy of a module, as a worker, a parameter server, or one of equal replicas.

    A forward computes ``loss_of(module, microbatch)``, a scalar, on the parameters that arrived for it, if any. An
    update steps the optimizer with the mean of the gradients that arrived for it, else with the reduced gradient; it
    does nothing if a death has left it no gradient. All parameters, and so all gradients, are float32 and sent as one
    vector, of `num_bytes`. Raises ProgramError for other parameters.
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
        # By microbatch, with the computation that made it.
        self._losses: dict[int, tuple[DispatchedWork, torch.Tensor]] = {}
        self._gradients: dict[int, tuple[DispatchedWork, torch.Tensor]] = {}
        self._reduced: torch.Tensor | None = None
        # The parameters that a server sends are those of one version.
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters that are trained."""
        return 4 * sum(parameter.numel() for parameter in self._parameters)

    def compute(self, work: DispatchedWork) -> None:
        """Execute a forward, a backward or an update."""
        for kept in (self._losses, self._gradients):
            for microbatch in [microbatch for microbatch, (made, _) in kept.items() if not made.is_wanted()]:
                del kept[microbatch]
        match work.instruction:
            case Forward(microbatch=microbatch):
                for vector in work.arrived:
                    self._set(vector)
                self._forward(work, microbatch)
            case Backward(microbatch=microbatch):
                self._backward(work, microbatch)
            case OptimizerStep():
                reduced, self._reduced = self._reduced, None
                if work.num_lost and not work.arrived:
                    # All its gradients, or the sum of them, were lost with a rank that died.
                    self._gradients.clear()
                else:
                    self._step(_mean(work.arrived) if work.arrived else reduced)
            case _:
                raise ProgramError(f"A replica cannot run {work.instruction}; expected forwards, backwards, updates.")

    def _forward(self, work: DispatchedWork, microbatch: int) -> None:
        own = threading.get_ident()

        def check(*_: object) -> None:
            # Another thread may use the module while this forward waits for its batch.
            if threading.get_ident() == own:
                work.check()

        with contextlib.ExitStack() as hooks:
            for submodule in self.module.modules():
                hooks.callback(submodule.register_forward_pre_hook(check).remove)
            self._losses[microbatch] = work, self._loss_of(self.module, microbatch)

    def _backward(self, work: DispatchedWork, microbatch: int) -> None:
        work.check()
        if microbatch not in self._losses:
            raise ProgramError(
                f"A backward of microbatch {microbatch} was issued without its forward, or its forward alone was "
                "abandoned. Issue both, and abandon both."
            )
        _, loss = self._losses.pop(microbatch)
        with contextlib.ExitStack() as hooks:
            for parameter in self._parameters:
                hooks.callback(parameter.register_hook(lambda _: work.check()).remove)
            gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True, materialize_grads=True)
        self._gradients[microbatch] = work, torch.cat([gradient.reshape(-1) for gradient in gradients])

    def outgoing(self, send: Send) -> torch.Tensor:
        """Return the gradient of the microbatch, shape (N,), or a copy of the parameters, shape (N,)."""
        if send.payload == "gradient":
            if send.microbatch not in self._gradients:
                raise ProgramError(
                    f"{send} was issued, but this rank has no gradient of microbatch {send.microbatch}. Let the send "
                    "wait for the backward."
                )
            return self._gradients.pop(send.microbatch)[1]
        with self._lock:
            return parameters_to_vector(self._parameters).detach().clone()

    def summand(self, instruction: AllReduce) -> torch.Tensor:
        """Return the gradient of the last backward, shape (N,)."""
        if instruction.bucket or len(self._gradients) != 1:
            raise ProgramError(
                f"{instruction} was issued while this rank has {len(self._gradients)} gradients; expected one, and "
                "bucket 0. Issue the sum after one backward and before the next."
            )
        _, (_, gradient) = self._gradients.popitem()
        return gradient

    def summed(self, instruction: AllReduce, total: torch.Tensor, num_ranks: int) -> None:  # noqa: ARG002
        """Keep the mean gradient, shape (N,), for the next update."""
        self._reduced = total / num_ranks

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


def _mean(arrived: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the mean of the tensors, shape (N,) each, in place of the first."""
    total, *others = arrived
    for other in others:
        total += other
    return total.div_(len(arrived))
