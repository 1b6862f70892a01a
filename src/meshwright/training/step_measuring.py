"""Measure this machine on CPUs: a model's ops, optimizers, transfers, and the runtime's overhead (`measure_here`).

`measure_emulated` measures the same on a cluster that is emulated on this machine.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from meshwright.capture import Captured, capture_model, flatten_batch, part
from meshwright.cost import CostModel
from meshwright.cost.memory import backend_of
from meshwright.emulation import Emulated, num_cores_here, open_lab
from meshwright.measurement import DEFAULT_SIZES, OpSource, RankContext, measure_links, measure_machine, run_ranks
from meshwright.records import Records, concat_records, from_measurements
from meshwright.runtime import measure_overhead
from meshwright.spec import Cluster, ClusterError, EventSink, Graph, Measurements, NullSink
from meshwright.training.job import tile
from meshwright.zoo import ModelSource, load_model

Sizes = tuple[tuple[str, int], ...]

# Emulated links are slow, and their ranks are stopped by quotas: fewer sizes than on a real network, and more time.
# The 23 series of four ranks at 100 Mbit/s take three times 0.7 s for 4 MiB, 45 s in all. No size takes a link more
# than a second.
_EMULATED_SIZES = (16, 2**16, 2**19, 2**22)
_EMULATED_S = 150.0
_EMULATED_TIMEOUT_S = 900.0
# Quotas work in periods of 5 to 100 ms, of which this is a multiple.
_PASSES_S, _LEAST_PASSES = 10.0, 3


def measure_here(
    reference: str | None,
    microbatch_sizes: Sequence[int],
    *,
    sizes: Sizes = (),
    num_ranks: int = 2,
    repeats: int = 10,
    transfer_sizes: Sequence[int] = DEFAULT_SIZES,
    events: EventSink | None = None,
) -> Measurements:
    """Measure ops of a model, optimizers, transfers and the runtime's overhead on the CPUs of this host.

    ``reference`` names the model (None: no model), ``sizes`` its size options; its ops are timed at each of
    ``microbatch_sizes``. ``num_ranks``: the number of processes; ``transfer_sizes``: bytes of their transfers. Raises
    MeasurementError if a process fails, and the errors of loading or capturing the model.
    """
    events = events or NullSink()
    if reference is not None:
        captured_model(reference, sizes, None)  # a model that cannot be captured is refused here, not in the processes
    return measure_machine(
        partial(op_source, reference, sizes) if reference is not None else None,
        microbatch_sizes,
        num_ranks=num_ranks,
        repeats=repeats,
        overhead_s=host_overhead(),
        transfer_sizes=transfer_sizes,
        events=events,
    )


def measure_emulated(
    reference: str | None,
    microbatch_sizes: Sequence[int],
    cluster: Cluster,
    *,
    sizes: Sizes = (),
    repeats: int = 10,
    events: EventSink | None = None,
) -> Records:
    """Measure a model on a cluster emulated on this host: its ops, the optimizers, and every collective.

    The collectives are timed on the emulated links, by ranks under their quotas. The ops are timed without quotas,
    because an op alone may fit into what a period allows, and would show nothing of the quota. Their times are divided
    by the speed of ranks under quotas: the seconds of all ops of the model at the largest batch size, relative to a
    whole pass of the model on all ranks at once. Without a model, a product of matrices with a tanh is timed under
    quotas and without. The speed is less than the share of a core (`benchmarks/emulation.py --only shares`). The other
    arguments are those of `measure_here`. Raises ClusterError for nodes of unequal numbers of devices, for devices of
    several kinds and for GPUs, and the errors of `open_lab` and `measure_here`.
    """
    device = _only_kind(cluster)
    emulated = Emulated(cluster=cluster, devices=tuple(range(cluster.num_ranks)))
    num_busy, batch_size = min(num_cores_here(), cluster.num_ranks), max(microbatch_sizes, default=1)
    slowdowns = tuple(cluster.device_kind(rank).slowdown for rank in range(cluster.num_ranks))
    passes = partial(run_ranks, _time_passes, reference, sizes, batch_size, timeout_s=_EMULATED_TIMEOUT_S)
    with tempfile.TemporaryDirectory(prefix="meshwright-measure-") as scratch, open_lab(emulated, Path(scratch)) as lab:
        lab.start_clock()
        # Before and after the links: the speed of shared processors drifts within minutes.
        before_s = passes(slowdowns, num_ranks=cluster.num_ranks, prepare=lab.enter)
        links = measure_links(
            num_ranks=cluster.num_ranks,
            num_nodes=len(cluster.nodes),
            sizes=[size for size in _EMULATED_SIZES if size <= _slowest_bytes_per_s(cluster)],
            budget_s=_EMULATED_S,
            timeout_s=_EMULATED_TIMEOUT_S,
            events=events,
            prepare=lab.enter,
        )
        after_s = passes(slowdowns, num_ranks=cluster.num_ranks, prepare=lab.enter)
    table = measure_here(
        reference,
        microbatch_sizes,
        sizes=sizes,
        num_ranks=num_busy,
        repeats=repeats,
        transfer_sizes=(),
        events=events,
    )
    if reference is None:
        alone_s = float(np.mean(passes((1.0,) * num_busy, num_ranks=num_busy)))
    else:
        alone_s = _sum_ops(
            op_source(reference, sizes, batch_size).graph, replace(table, device=device), cluster, batch_size
        )
    speed = alone_s / float(np.mean([*before_s, *after_s]))
    source = f"{table.conditions}; divided by {speed:.3g}, the speed on emulated cluster {cluster.name}"
    ops = from_measurements(table)
    ops = replace(ops, seconds=ops.seconds / speed, source=np.full(len(ops), source, object))
    source = f"{links.source[0]}; emulated cluster {cluster.name}"
    links = replace(links, source=np.full(len(links), source, object))
    found = concat_records([ops, links])
    return replace(found, device=np.full(len(found), device, object))


def _time_passes(
    context: RankContext, reference: str | None, sizes: Sizes, batch_size: int, slowdowns: Sequence[float]
) -> float:
    """Return the seconds of a pass (forward and backward) of a model, on all ranks at once, over some seconds.

    All ranks begin each pass together, as the steps of replicas. The time of a pass is that of the slowest rank, where
    the time of a rank with a slowdown is divided by it. Without a model, a pass is a matrix product and a chain of
    elementwise ops.
    """
    if reference is None:
        left, right = torch.randn(512, 512, requires_grad=True), torch.randn(512, 512)
        loss_of: Callable[[], torch.Tensor] = lambda: torch.tanh(left @ right).sum()
    else:
        options: dict[str, Any] = dict(sizes)
        loss_of = load_model(reference, batch_size=batch_size, **options).compute_loss
    # The first pass makes everything resident; the second one says how many there is time for.
    taken, count = list[float](), 2
    while len(taken) < count:
        dist.barrier()
        start = time.perf_counter()
        loss_of().backward()
        taken.append(time.perf_counter() - start)
        if len(taken) == count == 2:
            once = torch.tensor(taken[1], dtype=torch.float64)
            dist.all_reduce(once, dist.ReduceOp.MAX)
            count += max(math.ceil(_PASSES_S / float(once)), _LEAST_PASSES)
    slowest = torch.tensor(taken[2:], dtype=torch.float64) / slowdowns[context.rank]
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest.mean())


def _sum_ops(graph: Graph, table: Measurements, cluster: Cluster, batch_size: int) -> float:
    """Return the seconds of all ops of a pass (forward and backward) by a table measured without quotas."""
    kind = cluster.device_kind(0).at_usual_speed()
    costs = CostModel(cluster=cluster, measurements=table).estimate_ops(graph, batch_size, kind)
    return float(costs.microbatch_s().sum())


def _only_kind(cluster: Cluster) -> str:
    """Return the name of a cluster's device kind; raise ClusterError if a table cannot describe the cluster."""
    kinds = {cluster.device_kind(rank).usual_name: cluster.device_kind(rank) for rank in range(cluster.num_ranks)}
    if len(kinds) > 1 or any(backend_of(kind) != "cpu" for kind in kinds.values()):
        raise ClusterError(
            f"Cluster {cluster.name!r} has devices {', '.join(sorted(kinds))}. Emulated devices are shares of this "
            "machine's processors: expected one kind of processor, without a rate for float16. Give slower devices a "
            "slowdown."
        )
    if cluster.num_ranks == 1:
        raise ClusterError(
            f"Cluster {cluster.name!r} has one device; expected two or more, with links between them. Measure without "
            "--emulate."
        )
    if len({node.num_devices for node in cluster.nodes}) > 1:
        raise ClusterError(
            f"The nodes of cluster {cluster.name!r} have unequal numbers of devices, which a table cannot describe. "
            "Expected equal numbers: change the cluster, or plan without measured links."
        )
    return next(iter(kinds))


def _slowest_bytes_per_s(cluster: Cluster) -> float:
    """Return the bandwidth of the slowest link between nodes; infinity for one node."""
    links = [path.link for path in cluster.paths] + ([cluster.racks.uplink] if cluster.racks is not None else [])
    links += [node.nic for node in cluster.nodes] if len(cluster.nodes) > 1 else []
    return min((link.bandwidth_bytes_per_s for link in links), default=math.inf)


def host_overhead() -> float:
    """Return the host's seconds per instruction of the runtime, with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return measure_overhead()
    finally:
        torch.set_num_threads(threads)


def op_source(reference: str, sizes: Sizes, batch_size: int) -> OpSource:
    """Return a model for `measurement`: its graph, modules of its ops, and batches from its example's samples."""
    source, captured = captured_model(reference, sizes, None)
    if captured.graph.batch_size not in (None, batch_size):
        source, captured = captured_model(reference, sizes, batch_size)

    def batch(count: int) -> Sequence[torch.Tensor]:
        example = (source.inputs, source.targets)
        inputs, targets = pytree.tree_map_only(torch.Tensor, lambda item: tile(item, count), example)
        return flatten_batch(captured, inputs, targets)

    return OpSource(
        graph=captured.graph,
        cut=lambda feeds, fetches, ops, size: part(captured, feeds, fetches, batch_size=size, ops=ops),
        batch=batch,
    )


@lru_cache(maxsize=4)
def captured_model(reference: str, sizes: Sizes, batch_size: int | None) -> tuple[ModelSource, Captured]:
    """Return the model of a reference, and its capture for training at one batch size.

    ``batch_size`` None: for all batch sizes if possible.
    """
    options: dict[str, Any] = dict(sizes)
    source = load_model(reference, batch_size=batch_size, **options)
    captured = capture_model(
        source.model, source.inputs, targets=source.targets, loss=source.loss, name=reference, verify=False
    )
    return source, captured
