"""Single ops measured on an H100, and the model of GPU kernels that is fitted to them.

validation/data/h100_ops.csv   own measurement; `data/README.md` says how
cost/models/gpu.json           what ``scripts/renew_gpu_model.py`` fits to it
"""

from __future__ import annotations

from meshwright.cost.gpu.fit import MeasuredOp, MeasuredStep, fit_gpu
from meshwright.cost.gpu.rates import GpuModel
from meshwright.cost.kernels import Kernel, shipped_model
from meshwright.cost.optimizers import OptimizerLoop
from meshwright.spec import DeviceKind, load_cluster
from meshwright.validation.datasets import load_table

_LOOPS: dict[str, OptimizerLoop] = {"AdamW.fused": "fused", "AdamW.foreach": "foreach"}


def measured_kind() -> DeviceKind:
    """The kind of device that the ops were measured on."""
    return load_cluster("H100").device_kinds[0]


def load_ops() -> list[MeasuredOp]:
    """The ops with their seconds."""
    return [
        MeasuredOp(
            op=row["op"],
            dtype=row["dtype"],
            shapes=tuple(tuple(int(size) for size in shape.split("x")) for shape in row["shapes"].split()),
            seconds=float(row["seconds"]),
        )
        for row in load_table("h100_ops")
        if row["shapes"]
    ]


def load_optimizer_steps() -> list[MeasuredStep]:
    """Steps of AdamW over many tensors at once."""
    return [
        MeasuredStep(
            loop=_LOOPS[row["op"]],
            dtype=row["dtype"],
            num_elements=int(row["num_elements"]),
            seconds=float(row["seconds"]),
        )
        for row in load_table("h100_ops")
        if row["op"] in _LOOPS
    ]


def fit_shipped() -> GpuModel:
    """The model of the shipped rows."""
    kind, kernels = measured_kind(), shipped_model()

    def predict(m: float, n: float, k: float, count: float, dtype: str) -> float:
        sizes = {"m": [m], "n": [n], "k": [k], "count": [count]}
        return float(kernels.predict(Kernel(op="matmul", dtype=dtype, device=kind), sizes).seconds[0])

    return fit_gpu(load_ops(), load_optimizer_steps(), kind, predict)
