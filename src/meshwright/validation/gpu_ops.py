"""Single ops measured on an H100, and the model of GPU kernels that is fitted to them.

validation/data/h100_ops.parquet a table of the device, as `meshwright measure --device-table` writes it
cost/models/gpu.json what ``scripts/renew_gpu_model.py`` fits to it
"""

from __future__ import annotations

from meshwright.cost.gpu.fit import MeasuredOp, MeasuredStep, fit_gpu
from meshwright.cost.gpu.rates import GpuModel
from meshwright.cost.kernels import Kernel, shipped_model
from meshwright.cost.optimizers import OptimizerLoop
from meshwright.records.device_table import read_device_row
from meshwright.records.table import parse_sizes
from meshwright.spec import DeviceKind, load_cluster
from meshwright.validation.datasets import load_records

_LOOPS: dict[str, OptimizerLoop] = {"optimizer.adamw.fused": "fused", "optimizer.adamw.foreach": "foreach"}


def measured_kind() -> DeviceKind:
    """The kind of device that the ops were measured on."""
    return load_cluster("H100").device_kinds[0]


def load_ops() -> list[MeasuredOp]:
    """The ops with their seconds."""
    rows = load_records("h100_ops")
    columns = zip(rows.op, rows.shapes, rows.kernel, rows.dtype, rows.seconds.tolist(), strict=True)
    found = ((read_device_row(op, shapes, kernel), dtype, seconds) for op, shapes, kernel, dtype, seconds in columns)
    return [
        MeasuredOp(op=read[0], dtype=dtype, shapes=read[1], seconds=seconds)
        for read, dtype, seconds in found
        if read is not None
    ]


def load_optimizer_steps() -> list[MeasuredStep]:
    """Steps of AdamW over many tensors at once."""
    rows = load_records("h100_ops")
    columns = zip(rows.op, rows.shapes, rows.dtype, rows.seconds.tolist(), strict=True)
    return [
        MeasuredStep(
            loop=_LOOPS[op], dtype=dtype, num_elements=(parse_sizes(shapes) or {})["elements"], seconds=seconds
        )
        for op, shapes, dtype, seconds in columns
        if op in _LOOPS
    ]


def fit_shipped() -> GpuModel:
    """The model of the shipped rows."""
    kind, kernels = measured_kind(), shipped_model()

    def predict(m: float, n: float, k: float, count: float, dtype: str) -> float:
        sizes = {"m": [m], "n": [n], "k": [k], "count": [count]}
        return float(kernels.predict(Kernel(op="matmul", dtype=dtype, device=kind), sizes).seconds[0])

    return fit_gpu(load_ops(), load_optimizer_steps(), kind, predict)
