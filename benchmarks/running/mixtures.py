"""Mixtures of transformers with experts laid out: peak memory and step time, predicted and measured on pinned ranks.

Small configurations of Mixtral, Qwen3-MoE (its router's loss among it), DeepSeek-V3 (shared experts) and GPT-OSS
(biases), in which every token goes to all of four experts: so every rank gets as many rows as it sends, which is what
plans predict. Ranks are processes with one thread each over gloo.

    memory   the largest total of torch's allocations (`peak_memory`) beside what the plan predicts. Of what
             gloo's own threads let go the profiler sees nothing: of the processes of a team, which do the
             same, the least total counts, over so many runs
    steps    half of the steps, the ops of the local graph and the links, the other half; as in `predictions`
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from harness import make_row, prediction_row
from running.peak_memory import measure_rank_peak
from running.predictions import QUICK_STEPS, WARM_UP, fitted_links, measure
from running.shares import share_source

from meshwright.capture import capture_model
from meshwright.cost import CostModel
from meshwright.measurement import measure_machine
from meshwright.program import lower_graph
from meshwright.runtime import measure_overhead
from meshwright.simulator import simulate_plan
from meshwright.spec import (
    GradientExchange,
    Optimizer,
    Plan,
    Sharding,
    StagePlan,
    Workload,
    load_cluster,
    read_document,
    write_document,
)
from meshwright.zoo import load_model

TIMEOUT_S = 600
NUM_RUNS = 2
NUM_STEPS, MEMORY_TARGET, STEP_TARGET = 40, 0.03, 0.10
_COMMON = {
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 4,
}
CONFIGURATIONS = {
    "mixtral": {"intermediate_size": 256, "num_local_experts": 4},
    "qwen3_moe": {
        "moe_intermediate_size": 128,
        "num_experts": 4,
        "head_dim": 32,
        "norm_topk_prob": True,
        "output_router_logits": True,
    },
    "deepseek_v3": {
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    },
    "gpt_oss": {"intermediate_size": 128, "num_local_experts": 4, "head_dim": 32, "sliding_window": 32},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Experts over so many ranks, stages and replicas; ``microbatch`` samples of a rank."""

    model: str
    expert: int
    stages: int = 1
    replicas: int = 1
    zero: int = 0
    microbatch: int = 4
    num_microbatches: int = 2

    @property
    def name(self) -> str:
        words = f"{self.model}, expert {self.expert}"
        words += f", {self.stages} stages" * (self.stages > 1) + f", {self.replicas} replicas" * (self.replicas > 1)
        return words + f", ZeRO {self.zero}" * (self.zero > 0)


MEMORY = [
    *(Case(model=model, expert=2) for model in CONFIGURATIONS),
    Case(model="mixtral", expert=4),
    Case(model="mixtral", expert=2, stages=2),
    Case(model="qwen3_moe", expert=2, replicas=2, zero=3),
]
STEPS = [Case(model=model, expert=2) for model in ("mixtral", "qwen3_moe", "gpt_oss")]


def capture(reference):
    source = load_model(reference, fake=True)
    return capture_model(source.model, source.inputs, targets=source.targets, loss=source.loss, verify=False)


def make_plan(case: Case, reference: str, graph) -> Plan:
    count, layers = case.num_microbatches * case.replicas, len(graph.layers)
    edges = [layers * index // case.stages for index in range(case.stages + 1)]
    stages = tuple(
        StagePlan(start=a, stop=b, ranks=tuple(range(index * case.replicas, (index + 1) * case.replicas)))
        for index, (a, b) in enumerate(pairwise(edges))
    )
    return Plan(
        model=reference,
        graph_hash=graph.content_hash,
        cluster=f"{case.expert * case.stages * case.replicas}xcpu",
        workload=Workload(global_batch=case.microbatch * count * case.expert, optimizer=Optimizer(kind="adamw")),
        stages=stages,
        num_microbatches=count,
        sharding=Sharding(expert=case.expert),
        exchange=GradientExchange(zero=case.zero),
    )


def write_config(model: str, folder: str) -> str:
    path = Path(folder) / f"{model}.json"
    path.write_text(json.dumps({"model_type": model, **_COMMON, **CONFIGURATIONS[model]}))
    return str(path)


def measured_peaks(plan: Plan, folder: str) -> list[int]:
    """Of every process of the plan."""
    path = write_document(plan, Path(folder) / "plan.json")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    group = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(plan.num_devices)}
    started = [
        subprocess.Popen(
            [sys.executable, __file__, str(path)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | group | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(plan.num_devices)
    ]
    return [int(process.communicate(timeout=TIMEOUT_S)[0]) for process in started]


def source_of(reference: str, sharding: Sharding, batch_size: int):
    """Picklable: what every measuring process times."""
    captured = capture(reference)
    return share_source(lower_graph(captured.graph, sharding, ()), batch_size, captured)


def memory_rows(folder: str):
    errors = []
    for case in MEMORY:
        reference = write_config(case.model, folder)
        graph = capture(reference).graph
        plan = make_plan(case, reference, graph)
        predicted = simulate_plan(plan, graph, load_cluster(plan.cluster)).peak_memory_bytes
        peaks = np.array([measured_peaks(plan, folder) for _ in range(NUM_RUNS)])
        found = peaks.reshape(NUM_RUNS, plan.num_ranks, plan.sharding.width).min((0, 2)).tolist()
        ours, theirs = max(zip(predicted, found, strict=True), key=lambda pair: pair[1])
        errors.append(abs(ours / theirs - 1))
        print(f"{case.name}: predicted {ours:,}, measured {theirs:,} bytes ({ours / theirs - 1:+.1%})", file=sys.stderr)
        yield make_row(f"memory: {case.name}", ours, "bytes", baseline=theirs, ratio=ours / theirs)
    yield make_row("memory: mean |error|", float(np.mean(errors)), "", target=MEMORY_TARGET)


def step_rows(folder: str, quick: bool):
    steps = QUICK_STEPS if quick else NUM_STEPS
    errors = []
    for case in STEPS:
        reference = write_config(case.model, folder)
        graph = capture(reference).graph
        plan, cluster = make_plan(case, reference, graph), load_cluster(f"{case.expert}xcpu")
        before, _ = measure(plan, steps // 2)
        own, host = fitted_links(case.expert)
        source = partial(source_of, reference, plan.sharding)
        table = measure_machine(source, [case.microbatch], num_ranks=case.expert, transfer_sizes=())
        cost = CostModel(
            cluster=cluster,
            measurements=replace(table, overhead_s=measure_overhead()),
            collectives=own,
            collective_hosts=host,
        )
        predicted = simulate_plan(plan, graph, cluster, cost=cost, num_steps=3).step_time_s
        after, _ = measure(plan, steps // 2)
        row = prediction_row(f"step: {case.name}", predicted, np.array([before, after])[:, WARM_UP:].ravel())
        errors.append(abs(row.ratio - 1))
        print(f"{case.name}: predicted {predicted:.4f} s, measured {row.baseline:.4f} s", file=sys.stderr)
        yield row
    yield make_row("step: median |error|", float(np.median(errors)), "", target=STEP_TARGET)


def rows(quick: bool):
    """Memory of all cases, then steps."""
    with tempfile.TemporaryDirectory() as folder:
        return [*memory_rows(folder), *step_rows(folder, quick)]


NOTES = (
    "Rows: value = predicted, baseline = measured. Every token goes to all experts, so routing is even; what an uneven "
    "router does is in docs/concepts/experts.md."
)


if __name__ == "__main__":
    # One rank of a plan, whose peak is printed.
    print(measure_rank_peak(read_document(Plan, sys.argv[1])))
