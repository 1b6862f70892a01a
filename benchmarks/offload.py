"""Optimizers on the host: how fast the step is, and how well steps of such plans are predicted.

    speed         our step over pieces of some parameters against torch's fused AdamW over all of them at once, and
                  against DeepSpeed's CPU Adam where it is installed (deepspeed 0.19.8, whose kernel is compiled at its
                  first use). One pinned thread, float32, the arms alternated; seconds of the
                  thread's processor, so that other programs count only by what they do to caches
    predictions   predicted against measured step time of plans with offload: pinned ranks, one thread each, gloo. The
                  rates of a copy in memory and of the drive are measured first, as a cluster file would say them

A step of ours reads gradients that came down and leaves parameters that go up; copies are not part of it, as in the
other arms.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from harness import make_row, paired_ratios, parse_options, prediction_row, publish, ratio_row, score_row
from running.predictions import Configuration, make_plan, measure, measured_ops

from meshwright.cost import CostModel
from meshwright.cost.collectives.uneven_links import fit_links
from meshwright.measurement import measure_links
from meshwright.runtime.offload import HostedValues, HostSteps
from meshwright.runtime.offload.pieces import PieceFacts, make_hosted
from meshwright.runtime.offload.pinned_memory import DriveFile, HostMemory
from meshwright.runtime.offload.states import StatesOnHost
from meshwright.simulator import simulate_plan
from meshwright.spec import Cluster, Link, Nvme, Offload, load_cluster, load_shipped_graph, write_document
from meshwright.spec.precision import numbers_of

CPU = torch.device("cpu")
# Matrices as those of a transformer's blocks, in pieces of 25 MiB of gradients.
SHAPES = [(1024, 1024), (4096, 1024), (1024, 4096), (1024,)] * 3
PIECE_ELEMENTS = 25 * 2**20 // 4
PAIRS, QUICK_PAIRS = 40, 8
SPEED_TARGET, PREDICTION_TARGET = 1.03, 0.10
NUM_STEPS, QUICK_STEPS, WARM_UP = 40, 12, 5
BLOCK_BYTES = 2**26


def make_parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    found = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    for item in found:
        item.grad = torch.randn_like(item)
    return found


def timed(step: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> Callable[[], float]:
    def run() -> float:
        start = clock()
        step()
        return clock() - start

    step()
    return run


def our_step() -> Callable[[], None]:
    """The steps of all pieces, as the thread of the host makes them."""
    parameters = dict(enumerate(make_parameters()))
    groups: list[list[int]] = [[]]
    for index, item in parameters.items():
        if sum(parameters[i].numel() for i in groups[-1]) + item.numel() > PIECE_ELEMENTS and groups[-1]:
            groups.append([])
        groups[-1].append(index)
    memory, facts = HostMemory(CPU), []
    for number, group in enumerate(groups):
        starts = np.cumsum([0, *(parameters[i].numel() for i in group)]).tolist()
        own = {i: parameters[i] for i in group}
        facts.append(
            PieceFacts(
                number=number,
                stage=0,
                parameters=own,
                starts=dict(zip(group, starts, strict=False)),
                size=starts[-1],
            )
        )
    pieces = [make_hosted(item, numbers_of("float32"), memory) for item in facts]
    values = HostedValues(parameters, pieces)
    optimizer = torch.optim.AdamW(list(values.updated.values()), lr=1e-3)
    steps = HostSteps(
        optimizer,
        parameters,
        (),
        (),
        {},
        masters=values,
        pieces=pieces,
        make_states=lambda given: StatesOnHost(given, memory),
    )
    for piece in pieces:
        piece.copy_down()

    def step() -> None:
        with torch.no_grad():
            for piece in pieces:
                steps.update(piece)

    return step


def speed_rows(quick: bool):
    """Ratios of seconds of a step."""
    pairs = QUICK_PAIRS if quick else PAIRS
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    ours = timed(our_step(), time.thread_time)
    fused = timed(torch.optim.AdamW(make_parameters(), lr=1e-3, fused=True).step, time.thread_time)
    again = timed(torch.optim.AdamW(make_parameters(), lr=1e-3, fused=True).step, time.thread_time)
    found = [
        ratio_row("our step / torch's fused AdamW", *paired_ratios(ours, fused, pairs), target=SPEED_TARGET),
        ratio_row("torch's fused AdamW / itself (A/A)", *paired_ratios(again, fused, pairs)),
    ]
    with contextlib.suppress(ImportError):
        kernel = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        theirs = timed(kernel(make_parameters(), lr=1e-3, adamw_mode=True).step, time.thread_time)
        name = "our step / DeepSpeed's CPU Adam"
        found.append(ratio_row(name, *paired_ratios(ours, theirs, pairs), target=SPEED_TARGET))
    return found


def described_cluster(num_ranks: int) -> Cluster:
    """The shipped one with rates of this host, of all ranks together: copies of memory, reads and writes of a file."""
    copied = torch.empty(BLOCK_BYTES, dtype=torch.uint8), torch.ones(BLOCK_BYTES, dtype=torch.uint8)
    torch.set_num_threads(1)
    copy_s = float(np.median([timed(lambda: copied[0].copy_(copied[1]))() for _ in range(9)]))
    file, buffer = DriveFile(Path(tempfile.gettempdir()), BLOCK_BYTES), HostMemory(CPU).new(BLOCK_BYTES)
    buffer.view(0, (BLOCK_BYTES,), torch.uint8).fill_(1)
    assert buffer.memory is not None
    view = memoryview(buffer.memory)
    write_s = float(np.median([timed(lambda: file.write(0, view))() for _ in range(5)]))
    read_s = float(np.median([timed(lambda: file.read(0, view))() for _ in range(5)]))
    file.close()
    node = replace(
        load_cluster(f"{num_ranks}xcpu").nodes[0],
        host_memory_bandwidth_bytes_per_s=2 * BLOCK_BYTES / copy_s * num_ranks,
        pcie=Link(latency_s=50e-6, bandwidth_bytes_per_s=BLOCK_BYTES / copy_s),
        nvme=Nvme(
            capacity_bytes=10**11, read_bytes_per_s=BLOCK_BYTES / read_s, write_bytes_per_s=BLOCK_BYTES / write_s
        ),
    )
    return replace(load_cluster(f"{num_ranks}xcpu"), nodes=(node,))


CASES = {
    "states on the host, pipeline": ("gpt-tiny", "1f1b", Offload(optimizer="host")),
    "states on the host, replicas": ("gpt-tiny", "data", Offload(optimizer="host")),
    "states on the host, ZeRO 1": ("llama-tiny", "zero1", Offload(optimizer="host")),
    "states on drives, pipeline": ("llama-tiny", "1f1b", Offload(optimizer="nvme")),
    "all on the host, ZeRO 3": ("llama-tiny", "fsdp", Offload(optimizer="host", parameters="host")),
    "activations on the host, pipeline": ("gpt-tiny", "1f1b", Offload(activations="host")),
    "activations on the host, replicas": ("llama-tiny", "data", Offload(activations="host")),
}


def prediction_rows(quick: bool):
    """One row per plan, and the score."""
    steps, num_ranks = QUICK_STEPS if quick else NUM_STEPS, 2
    cluster = described_cluster(num_ranks)
    own, host = fit_links(measure_links(num_ranks=num_ranks), cluster)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = write_document(cluster, Path(folder) / "cluster.json")
        for name, (model, kind, offload) in CASES.items():
            configuration = Configuration(model=model, kind=kind, microbatch=8)
            graph = load_shipped_graph(model)
            plan = replace(make_plan(configuration, graph), cluster=str(path), offload=offload)
            before, _ = measure(plan, steps // 2)
            table = measured_ops(model, configuration.microbatch, num_ranks, plan.sharding)
            cost = CostModel(cluster=cluster, measurements=table, collectives=own, collective_hosts=host)
            predicted = simulate_plan(plan, graph, cluster, cost=cost, num_steps=3)
            after, _ = measure(plan, steps // 2)
            halves = np.array([before, after])[:, WARM_UP:]
            found.append(prediction_row(name, predicted.step_time_s, halves.ravel()))
            print(f"{name}: predicted {found[-1].value:.4f} s, measured {found[-1].baseline:.4f} s", file=sys.stderr)
    found.append(score_row(found, PREDICTION_TARGET))
    low = cluster.nodes[0]
    assert low.nvme is not None
    found.append(make_row("a copy in memory, each rank", low.pcie.bandwidth_bytes_per_s / 1e9, "GB/s"))
    found.append(make_row("the drive, reads", low.nvme.read_bytes_per_s / 1e9, "GB/s"))
    found.append(make_row("the drive, writes", low.nvme.write_bytes_per_s / 1e9, "GB/s"))
    return found


SECTIONS = {"speed": speed_rows, "predictions": prediction_rows}


def main() -> int:
    options = parse_options(__doc__ or "", tuple(SECTIONS))
    # Ranks are pinned by their launcher: what pins this process comes last.
    chosen = [name for name in ("predictions", "speed") if name in (options.only or SECTIONS)]
    rows = [row for name in chosen for row in SECTIONS[name](options.quick)]
    return publish("offload", rows, options, label="-".join(chosen) if options.only else "")


if __name__ == "__main__":
    sys.exit(main())
