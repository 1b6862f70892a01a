"""Apply a plan's precision: types of gradients, TF32, and master weights.

    gradients   autograd makes and accumulates the gradient of a parameter in its ``grad_dtype``
    products    of float32 matrices use TF32 if the precision says so, while a step runs (`multiplying`)
    masters     for a parameter of two bytes per element the optimizer updates a float32 copy; it reads the summed
                gradient, and its result is copied back into the parameter (Megatron-LM:
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
    """Raise PlanError if this plan cannot run in its precision, or if the GPU does not support it."""
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
            f"The schedule {WAVES} sums changes of weights, but {plan.workload.precision} keeps two copies of them; "
            "such a plan can only be simulated. Plan with --precision amp, bfloat16 or float32."
        )
    if "bfloat16" not in (numbers.values, numbers.autocast) or device is None or device.type != "cuda":
        return
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        major, minor = torch.cuda.get_device_capability(device)
        raise PlanError(
            f"The plan computes in bfloat16, which {torch.cuda.get_device_name(device)} (compute capability "
            f"{major}.{minor}) does not support; GPUs do from 8.0 on. Plan with --precision float32 or amp-float16."
        )


def autocast_type(plan: Plan | Placement) -> torch.dtype | None:
    """Return the type of torch's autocast in forwards; None if the plan's precision uses no autocast."""
    return _dtype(plan.workload.numbers.autocast)


@contextmanager
def multiplying(numbers: Numbers) -> Iterator[None]:
    """Set in the block whether GPUs multiply float32 matrices in TF32, as the precision says.

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
    """Set the type of the parameters' gradients, as the precision says.

    Raises PlanError if this version of torch does not support gradients of another type.
    """
    for parameter in parameters.values():
        if parameter.requires_grad and parameter.dtype is _dtype(numbers.values) and not isinstance(parameter, DTensor):
            set_gradient_type(parameter, _dtype(numbers.gradients))


def set_gradient_type(parameter: torch.Tensor, dtype: torch.dtype | None) -> None:
    """Set the type of a tensor's gradient (None: no change). Raises PlanError if torch does not support it."""
    if dtype is None or dtype is gradient_type(parameter):
        return
    if not hasattr(parameter, "grad_dtype"):
        raise PlanError(
            f"torch {torch.__version__} accumulates gradients only in the type of their parameters; the plan has "
            f"parameters in {parameter.dtype} and gradients in {dtype}. Install torch 2.13, or plan with "
            "--grad-dtype bfloat16."
        )
    parameter.grad_dtype = dtype


def gradient_type(parameter: torch.Tensor) -> torch.dtype:
    """Return the type of a parameter's gradient."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


class Masters:
    """The float32 master weights of a rank.

    ``masters``: by tensor id. ``updated``: the tensors that the optimizer updates, by tensor id: master weights where
    there are any, else the parameters.
    """

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
        """Run the block as an optimizer step on master weights.

        Gradients are copied to the masters before, and the masters to ``parameters`` after the block.
        """
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
        """Return the master weights by tensor id (as text)."""
        return {str(tensor): master.detach() for tensor, master in self.masters.items()}

    def take_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore a `state`."""
        with torch.no_grad():
            for tensor, master in self.masters.items():
                master.copy_(state[str(tensor)])


def _dtype(name: str) -> torch.dtype | None:
    found = getattr(torch, name) if name else None
    assert found is None or isinstance(found, torch.dtype), "precisions name types of torch"
    return found
