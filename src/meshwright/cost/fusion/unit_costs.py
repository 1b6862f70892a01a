"""Seconds of the ops of a graph with compiled layers: the time of each kernel is charged to one of its ops.

In the forward, the time of a kernel is charged to its last op; in the backward, to its op that comes first in the
graph. So the time is complete at the end of a unit. The other ops of the kernel take no time. Extern (library) kernels
take the time of their ops. Generated kernels:

    on GPUs       the fitted rates of torch's kernels (`cost.gpu.gpu_products`): kernels with row sums take the rate of
                  a norm's or a softmax's forward with such rows; kernels with column sums take the rate of the longest
                  rows, because inductor splits them until they fill the device, plus a small kernel that adds the
                  parts; all others take the rate of element-wise ops
    elsewhere     the time of the kernel's ops when they run alone, times the kernel's bytes / the bytes of these ops;
                  the time of an op in several kernels is divided in proportion to their bytes; an op with extern
                  kernels is charged to these

Adding gradients across compiled units, and converting gradients of parameters to a wider type, costs the same as
without compilation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from meshwright.cost.costs import BASES, Basis, OpCost, op_cost_around
from meshwright.cost.fusion.partition import FusedUnit, fuse_unit
from meshwright.cost.gpu.gpu_products import GpuModel, Launch
from meshwright.cost.gpu.launches import sum_of
from meshwright.cost.host_issue import kernel_issue_seconds, unit_issue_seconds
from meshwright.cost.op_estimates import TRANSFERRED
from meshwright.cost.roofline import RooflineSeconds
from meshwright.cost.traits import operator_name, passes_of
from meshwright.spec import DeviceKind, Graph, compiled_units

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from meshwright.cost.autocast import Widths
    from meshwright.cost.fusion.fused_kernels import FusedKernel
    from meshwright.cost.fusion.written_values import Device
    from meshwright.cost.op_classes import OpClasses
    from meshwright.spec.precision import Numbers

_NONE = RooflineSeconds(forward_s=0.0, backward_s=0.0, accumulate_s=0.0)
# The rate of row sums by the op that contains them.
_ROW_SORTS = {"rms_norm": "rms_norm", "softmax": "softmax", "log_softmax": "softmax", "cross_entropy_loss": "softmax"}
# torch/_inductor/choices.py, reduction_split_factor: sums of fewer columns per multiprocessor are split, if they have
# at least this number of rows.
_COLUMNS_EACH, _LEAST_SPLIT = 64, 128


class ClassCosts(NamedTuple):
    """Costs of each class of equal ops, with one entry per class in each field.

    ``alone``: cost without compilation. ``dense``: cost of the extern (library) kernels. ``widened``: cost of copying
    parameter gradients to a wider type, None without copies. ``issued``: seconds in which the host issues the op; empty
    on CPUs. ``measured``: whether the cost comes from a measurement or a trace.
    """

    alone: Sequence[OpCost]
    dense: Sequence[OpCost]
    widened: Sequence[OpCost | None]
    issued: Sequence[RooflineSeconds]
    measured: Sequence[bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledCosts:
    """Costs of all ops of a graph; ``issued``: seconds in which the host issues each op, empty on CPUs."""

    costs: list[OpCost]
    issued: list[RooflineSeconds]


class UnitEstimator:
    """An estimator of the costs of all ops of a graph with compiled layers.

    ``known``: costs of classes of equal ops. ``types``: the data type in which each class computes.
    """

    def __init__(
        self,
        graph: Graph,
        batch_size: int,
        classes: OpClasses,
        known: ClassCosts,
        types: Sequence[str],
        kind: DeviceKind,
        numbers: Numbers,
        widths: Widths,
        gpu: GpuModel | None,
        host_factor: float,
    ) -> None:
        self.graph, self.batch_size, self.known, self.types = graph, batch_size, known, types
        self.kind, self.numbers, self.widths, self.gpu = kind, numbers, widths, gpu
        self.of = [int(index) for index in classes.class_of]
        self.costs = [known.alone[index] for index in self.of]
        self.issued = [known.issued[index] for index in self.of] if known.issued else []
        self.last_reader: dict[int, int] = {}
        for index, op in enumerate(graph.ops):
            self.last_reader.update(dict.fromkeys(op.inputs, index))
        self.last_reader.update(dict.fromkeys(graph.outputs, len(graph.ops)))
        self.read: set[int] = set()
        self.host_factor = host_factor
        self.units: dict[Hashable, FusedUnit] = {}

    def estimate_all(self) -> CompiledCosts:
        """Return the costs of all ops, inside and outside of compiled units."""
        for start, stop in compiled_units(self.graph):
            if all(op.phase == "forward" for op in self.graph.ops[start:stop]):
                self.estimate(start, stop)
        return CompiledCosts(costs=self.costs, issued=self.issued)

    def estimate(self, start: int, stop: int) -> None:
        """Compute the costs of the ops ``start:stop`` (one compiled unit); store them in ``costs`` and ``issued``."""
        unit = self._fused(start, stop)
        dense = {
            (op, kernel.backward)
            for kernel in (*unit.forward, *unit.backward)
            if kernel.extern
            for op, _ in kernel.members
        }
        shares = _Shares(self, unit, start, dense)
        for op in range(start, stop):
            alone = self.known.alone[self.of[op]]
            kept = self.known.dense[self.of[op]]
            here = float((op - start, False) in dense), float((op - start, True) in dense)
            cost = replace(
                kept,
                seconds=_part(kept.seconds, alone.seconds, here),
                low=_part(kept.low, alone.low, here),
                high=_part(kept.high, alone.high, here),
            )
            widened = self.known.widened[self.of[op]]
            self.costs[op] = _added(cost, widened) if widened is not None else cost
        for kernel in (*unit.forward, *unit.backward):
            if not kernel.extern:
                self._add(start + _home(kernel, stop - start), shares.estimate(kernel))
        for op, launch in self._sums(start, stop):
            self._add(op, self._launched([launch], backward=True))
        if self.issued:
            self._issue(unit, start, stop)

    def _fused(self, start: int, stop: int) -> FusedUnit:
        ops = self.graph.ops[start:stop]
        later = frozenset(i for op in ops for i in op.outputs if self.last_reader.get(i, -1) >= stop)
        local: dict[int, int] = {}
        wiring = tuple(tuple(local.setdefault(i, len(local)) for i in (*op.inputs, *op.outputs)) for op in ops)
        key = (tuple(self.of[start:stop]), wiring, tuple(sorted(local[i] for i in later)))
        if key not in self.units:
            device: Device = "cuda" if self.gpu is not None else "cpu"
            self.units[key] = fuse_unit(
                self.graph, start, stop, self.batch_size, self.numbers, self.widths, later, device
            )
        return self.units[key]

    def _sums(self, start: int, stop: int) -> list[tuple[int, Launch]]:
        """Return additions of gradients of tensors that an earlier unit reads, too."""
        wanted: dict[int, int] = {}
        for op in range(start, stop):
            for i in self.graph.ops[op].inputs:
                if self.graph.tensors[i].requires_grad:
                    wanted.setdefault(i, op)
        again = {i: op for i, op in wanted.items() if i in self.read}
        self.read |= wanted.keys()
        if self.graph.mode != "training" or self.gpu is None:
            return []
        return [
            (op, sum_of(self.graph.tensors[i].num_elements(self.batch_size), self.widths.of(i)))
            for i, op in again.items()
        ]

    def _launched(self, launches: Sequence[Launch], *, backward: bool) -> OpCost:
        assert self.gpu is not None
        seconds = self.gpu.seconds(launches, self.kind)
        basis, interval = self.gpu.basis_on(self.kind)
        passes = RooflineSeconds(
            forward_s=0.0 if backward else seconds, backward_s=seconds if backward else 0.0, accumulate_s=0
        )
        return op_cost_around(passes, interval, basis)

    def bytes_alone(self, index: int, *, backward: bool) -> float:
        """Return the bytes that an op reads and writes in its forward or backward if it is not compiled."""
        op = self.graph.ops[index]
        passes = passes_of(self.graph, op, self.batch_size, self.types[self.of[index]])
        return passes.backward.num_bytes if backward else passes.forward.num_bytes

    def is_measured(self, kernel: FusedKernel, start: int) -> bool:
        """Return whether all ops that a kernel computes were measured; recomputed ops are not considered."""
        own = [op for op, backward in kernel.members if backward == kernel.backward]
        return bool(own) and all(self.known.measured[self.of[start + op]] for op in own)

    def launched(self, kernel: FusedKernel, start: int) -> OpCost:
        """Return the cost of a generated kernel on a GPU; ``start``: index of the unit's first op."""
        width, hot = 2 if kernel.narrow else 4, kernel.fresh
        cold = kernel.read + kernel.written - hot
        launches = [Launch(sort="pointwise", width=width, cold=cold, hot=hot)]
        if kernel.rows:
            names = {operator_name(self.graph.ops[start + op]) for op, _ in kernel.members}
            sort = next((_ROW_SORTS[name] for name in sorted(names) if name in _ROW_SORTS), "layer_norm")
            launches = [Launch(sort=sort, width=width, row=kernel.rows, cold=cold, hot=hot)]
        elif kernel.columns:
            longest = self.gpu.rate("column_sum", width).rows[-1] if self.gpu is not None else 1
            launches = [Launch(sort="column_sum", width=width, row=longest, cold=cold, hot=hot)]
        elif not kernel.read:
            launches = [Launch(sort="filling", width=width, cold=cold)]
        if self._is_split(kernel):
            launches.append(Launch(sort="pointwise"))
        return self._launched(launches, backward=kernel.backward)

    def _is_split(self, kernel: FusedKernel) -> bool:
        few = kernel.columns < _COLUMNS_EACH * max(self.kind.num_multiprocessors, 1)
        return bool(kernel.columns) and few and kernel.summed >= _LEAST_SPLIT

    def _add(self, op: int, cost: OpCost) -> None:
        self.costs[op] = _added(self.costs[op], cost)

    def _issue(self, unit: FusedUnit, start: int, stop: int) -> None:
        factor = self.host_factor
        for op in range(start, stop):
            self.issued[op] = replace(_NONE, accumulate_s=self.known.issued[self.of[op]].accumulate_s)
        called = unit_issue_seconds(trained=bool(unit.backward)).times(factor)
        self.issued[start] = self.issued[start].plus(replace(called, backward_s=0.0))
        self.issued[stop - 1] = self.issued[stop - 1].plus(replace(called, forward_s=0.0))
        for kernel in (*unit.forward, *unit.backward):
            op, count = start + _home(kernel, stop - start), 2 if self._is_split(kernel) else 1
            launched = kernel_issue_seconds(count, extern=kernel.extern, backward=kernel.backward)
            self.issued[op] = self.issued[op].plus(launched.times(factor))


class _Shares:
    """The part of an op's own seconds in each kernel, for kernels without rates of their own."""

    def __init__(self, estimator: UnitEstimator, unit: FusedUnit, start: int, dense: set[tuple[int, bool]]) -> None:
        self.estimator, self.start, self.dense = estimator, start, dense
        self.total: dict[tuple[int, bool], float] = {}
        for kernel in (*unit.forward, *unit.backward):
            if not kernel.extern:
                for op, backward in kernel.members:
                    if backward == kernel.backward:
                        key = (op, backward)
                        self.total[key] = self.total.get(key, 0.0) + kernel.read + kernel.written

    def estimate(self, kernel: FusedKernel) -> OpCost:
        """Return the cost of a generated kernel."""
        if self.estimator.gpu is not None and not self.estimator.is_measured(kernel, self.start):
            return self.estimator.launched(kernel, self.start)
        moved, alone, seconds = kernel.read + kernel.written, 0.0, [_NONE, _NONE, _NONE]
        bases: set[Basis] = {"transferred"}
        for op, backward in kernel.members:
            if backward != kernel.backward or (op, backward) in self.dense:
                continue
            cost = self.estimator.known.alone[self.estimator.of[self.start + op]]
            share = moved / self.total[op, backward] if self.total[op, backward] else 1.0
            alone += share * self.estimator.bytes_alone(self.start + op, backward=backward)
            part = (0.0, share, 0.0) if backward else (share, 0.0, 0.0)
            parts = (cost.seconds, cost.low, cost.high)
            seconds = [total.plus(each.scaled(*part)) for total, each in zip(seconds, parts, strict=True)]
            bases.add(cost.basis)
        factor = moved / alone if alone else 1.0
        own, low, high = (each.times(factor) for each in seconds)
        return OpCost(
            seconds=own,
            low=_each(min, low, own.times(TRANSFERRED.low)),
            high=_each(max, high, own.times(TRANSFERRED.high)),
            basis=max(bases, key=BASES.index),
        )


def _home(kernel: FusedKernel, stop: int) -> int:
    """Return the op of a unit to which a kernel's time is charged."""
    own = [op for op, backward in kernel.members if backward == kernel.backward]
    if kernel.backward:
        return min(own, default=stop - 1)
    return max(own, default=stop - 1)


def _part(dense: RooflineSeconds, alone: RooflineSeconds, here: tuple[float, float]) -> RooflineSeconds:
    return replace(dense.scaled(*here, 0.0), accumulate_s=alone.accumulate_s)


def _added(cost: OpCost, more: OpCost) -> OpCost:
    """Return the sum of both costs, with the less certain basis."""
    bases = [each.basis for each in (cost, more) if each.seconds != _NONE]
    return OpCost(
        seconds=cost.seconds.plus(more.seconds),
        low=cost.low.plus(more.low),
        high=cost.high.plus(more.high),
        basis=max(bases or [more.basis], key=BASES.index),
    )


def _each(choose: Callable[[float, float], float], one: RooflineSeconds, two: RooflineSeconds) -> RooflineSeconds:
    return RooflineSeconds(
        forward_s=choose(one.forward_s, two.forward_s),
        backward_s=choose(one.backward_s, two.backward_s),
        accumulate_s=choose(one.accumulate_s, two.accumulate_s),
    )
