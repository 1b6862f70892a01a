"""Costs of the ops of a graph on a CUDA device, from the kernels that torch launches for them.

products, convolutions,  the product predictor (`cost.kernels`), and the additional kernels
recurrent layers
attention                by the kernel that torch chooses (`cost.gpu.attention`)
all others               the kernels of each pass (`cost.gpu.launches`) at fitted rates (`cost.gpu.rates`)

Only rooflines are replaced: measurements and traces stay.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright.cost.costs import op_cost_around
from meshwright.cost.gpu.attention import ATTENTION, attention_seconds
from meshwright.cost.gpu.launches import launches_of, sum_of
from meshwright.cost.roofline import RooflineSeconds
from meshwright.cost.traits import passes_of
from meshwright.cost.work import read_work
from meshwright.cost.work.calls import read_call
from meshwright.spec.units import DTYPE_BYTES

if TYPE_CHECKING:
    from meshwright.cost.costs import OpCost
    from meshwright.cost.gpu.rates import GpuModel
    from meshwright.cost.kernels import KernelQueries
    from meshwright.cost.software import Software
    from meshwright.cost.widths import Widths
    from meshwright.spec import DeviceKind, Op

_DENSE = ("product", "convolution", "recurrent")


def estimate_launches(
    model: GpuModel,
    asked: KernelQueries,
    predicted: list[OpCost],
    dtypes: list[str],
    widths: Widths,
    kind: DeviceKind,
    software: Software,
) -> list[OpCost]:
    """Return the costs of the ops of ``asked``, which compute in ``dtypes``; ``predicted`` by the product predictor."""
    columns = zip(asked.costs, predicted, asked.ops, asked.keys, dtypes, strict=True)
    return [
        _estimate(model, asked, op, key, dtype, widths, kind, dense, software) if bound.basis == "roofline" else bound
        for bound, dense, op, key, dtype in columns
    ]


def _estimate(
    model: GpuModel,
    asked: KernelQueries,
    op: Op,
    key: str,
    dtype: str,
    widths: Widths,
    kind: DeviceKind,
    predicted: OpCost,
    software: Software,
) -> OpCost:
    graph, batch_size = asked.graph, asked.batch_size
    passes = passes_of(graph, op, batch_size, dtype, key)
    work, call = read_work(key), read_call(key)
    family = work.family if work is not None else ""
    width = DTYPE_BYTES[dtype]
    accumulated = passes.accumulate.num_bytes / (3 * width)
    if call is None:
        return predicted
    basis, interval = model.basis_on(kind)
    if family == "attention":
        trained = passes.backward.num_kernels > 0
        seconds = attention_seconds(graph, op, call, dtype, kind, trained=trained, software=software)
        return op_cost_around(seconds, ATTENTION, "transferred")
    launched = launches_of(graph, op, batch_size, key, passes, widths, kind.num_multiprocessors)
    extra = [sum_of(0.0, width)] * (passes.accumulate.num_kernels - 1)
    accumulate = [sum_of(accumulated, width), *extra] if passes.accumulate.num_kernels else []
    seconds = RooflineSeconds(
        forward_s=model.seconds(launched.forward, kind),
        backward_s=model.seconds(launched.backward, kind),
        accumulate_s=model.seconds(accumulate, kind),
    )
    if family not in _DENSE:
        return op_cost_around(seconds, interval, basis)
    beside = replace(predicted, seconds=replace(predicted.seconds, accumulate_s=0.0))
    return replace(beside, low=_kept(beside.low), high=_kept(beside.high)).plus(seconds, interval)


def _kept(seconds: RooflineSeconds) -> RooflineSeconds:
    return replace(seconds, accumulate_s=0.0)
