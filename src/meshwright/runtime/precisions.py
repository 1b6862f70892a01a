"""The types of a plan's precision in the runtime: gradients, and master weights.

    gradients   a parameter's ``grad_dtype`` is the type in which autograd makes and accumulates its gradient
    products    of float32 matrices use TF32 or not, as the precision says, while a step runs (`multiplying`)
    masters     for a parameter of two bytes per element the optimizer updates a float32 copy; it reads the gradient
                as summed, and its result is copied back into the parameter (Megatron-LM:
                optimizer/optimizer.py, Float16OptimizerWithFloat16Params)

Masters start as exact copies of the parameters. Under ZeRO 2 and 3 the float32 shards of the weights are the masters
(`fully_sharded`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from meshwright.spec import Placement, Plan, PlanError
from meshwright.spec.exchange import WAVES
from meshwright.spec.precision import SIMULATED_ONLY, Numbers


def check_precision(plan: Plan | Placement, device: torch.device | None = None) -> None:
    """Raise PlanError for a precision that cannot be run under this plan, or that the GPU does not support."""
    numbers, training = plan.workload.numbers, plan.workload.kind == "training"
    if plan.workload.precision in SIMULATED_ONLY:
        raise PlanError(
            f"The plan computes in {plan.workload.precision}, which can only be simulated. Plan with another precision "
            "to run, such as mixed or amp-float16."
        )
    if training and numbers.scales_loss and isinstance(plan, Placement):
        raise PlanError(
            f"A placement cannot train in {plan.workload.precision}, whose losses are scaled; it can only be "
            "simulated. Place ops with --precision amp, or plan by layers."
        )
    if training and numbers.master and isinstance(plan, Plan) and plan.schedule == WAVES:
        raise PlanError(
            f"The schedule {WAVES} sums the changes of weights, but {plan.workload.precision} has two copies of them; "
            "such a plan can only be simulated. Plan with --precision amp, bfloat16 or float32."
        )
    if "bfloat16" not in (numbers.values, numbers.autocast) or device is None or device.type != "cuda":
        return
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        major, minor = torch.cuda.get_device_capability(device)
        raise PlanError(
            f"The plan computes in bfloat16, which {torch.cuda.get_device_name(device)} (compute capability "
            f"{major}.{minor}) does not have; GPUs have it from 8.0 on. Plan with --precision float32 or amp-float16."
        )


def autocast_type(plan: Plan | Placement) -> torch.dtype | None:
    """Return the type that forwards are cast to by torch's autocast."""
    return _dtype(plan.workload.numbers.autocast)


@contextmanager
def multiplying(numbers: Numbers) -> Iterator[None]:
    """Set, inside of the context, how GPUs multiply float32 matrices, as the precision says.

    Convolutions and recurrent layers keep the process's setting for cuDNN, by default TF32.
    """
    setting = torch.backends.cuda.matmul
    before, wanted = setting.fp32_precision, "tf32" if numbers.products == "tf32" else "ieee"
    if numbers.compute != "float32" or before == wanted or (before, wanted) == ("none", "ieee"):
        yield
        return
    setting.fp32_precision = wanted
    try:
        yield
    finally:
        setting.fp32_precision = before


def set_gradient_types(parameters: Mapping[int, torch.nn.Parameter], numbers: Numbers) -> None:
    """Let autograd make the gradients of parameters in the type of the precision.

    Raises PlanError for a version of torch that does not support it.
    """
    for parameter in parameters.values():
        if parameter.requires_grad and parameter.dtype is _dtype(numbers.values) and not isinstance(parameter, DTensor):
            set_gradient_type(parameter, _dtype(numbers.gradients))


def set_gradient_type(parameter: torch.Tensor, dtype: torch.dtype | None) -> None:
    """Let a tensor have gradients of another type than its own. Raises PlanError if torch does not support it."""
    if dtype is None or dtype is gradient_type(parameter):
        return
    if not hasattr(parameter, "grad_dtype"):
        raise PlanError(
            f"torch {torch.__version__} accumulates gradients only in the type of their parameters; the plan has "
            f"{parameter.dtype} and {dtype}. Install torch 2.13, or plan with --grad-dtype bfloat16."
        )
    parameter.grad_dtype = dtype


def gradient_type(parameter: torch.Tensor) -> torch.dtype:
    """Return the type of a parameter's gradient."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


class Masters:
    """Float32 master weights, by tensor id; ``updated``: the optimizer's tensors, masters or the parameters."""

    def __init__(self, parameters: Mapping[int, torch.nn.Parameter], numbers: Numbers) -> None:
        self.updated = dict(parameters)
        self.masters: dict[int, torch.nn.Parameter] = {}
        for tensor, parameter in parameters.items():
            is_narrow = parameter.dtype is _dtype(numbers.values) and parameter.dtype is not _dtype(numbers.master)
            if numbers.master and parameter.requires_grad and is_narrow:
                master = torch.nn.Parameter(parameter.detach().to(_dtype(numbers.master)))
                self.updated[tensor] = self.masters[tensor] = master
        self._of = {id(parameters[tensor]): master for tensor, master in self.masters.items()}

    @contextmanager
    def stepping(self, parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
        """Give masters the gradients of their parameters, for an optimizer step; afterwards copy masters back."""
        pairs = [(item, self._of[id(item)]) for item in parameters if item.grad is not None and id(item) in self._of]
        for parameter, master in pairs:
            assert parameter.grad is not None, "others were left out"
            master.grad = parameter.grad.to(master.dtype)
        yield
        if pairs:
            with torch.no_grad():
                torch._foreach_copy_([parameter for parameter, _ in pairs], [master for _, master in pairs])
        for _, master in pairs:
            master.grad = None

    def state(self) -> dict[str, torch.Tensor]:
        """Return the masters by tensor id."""
        return {str(tensor): master.detach() for tensor, master in self.masters.items()}

    def take_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from a `state`."""
        with torch.no_grad():
            for tensor, master in self.masters.items():
                master.copy_(state[str(tensor)])


def _dtype(name: str) -> torch.dtype | None:
    found = getattr(torch, name) if name else None
    assert found is None or isinstance(found, torch.dtype), "precisions name types of torch"
    return found
