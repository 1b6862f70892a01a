"""Two ranks of `test_offload_memory`: what their devices hold at the peak of a few steps, and what was predicted."""

from dataclasses import replace

import torch
import torch.distributed as dist

from benchmarks.running.peak_memory import measure_rank_peak
from meshwright.simulator import simulate_plan
from meshwright.spec import (
    GradientExchange,
    Nvme,
    Offload,
    Optimizer,
    Plan,
    StagePlan,
    Workload,
    load_cluster,
    load_shipped_graph,
    recompute_choices,
    write_document,
)
from tests.rank_results import write_results

HOST, NVME = Offload(optimizer="host"), Offload(optimizer="nvme")
SAVED, BOTH = Offload(activations="host"), Offload(optimizer="host", activations="host")
PIPELINE = ((0,), (1,))
# Model, replicas of stages, ZeRO stage, what is kept away, optimizer, what is computed again.
CASES = {
    "host": ("gpt-tiny", PIPELINE, 0, HOST, "adamw", "none"),
    "host momentum": ("llama-tiny", PIPELINE, 0, HOST, "sgd", "none"),
    "host again": ("gpt-tiny", PIPELINE, 0, HOST, "adamw", "full"),
    "drives": ("llama-tiny", PIPELINE, 0, NVME, "adamw", "none"),
    "drives convolutions": ("vgg-tiny", PIPELINE, 0, NVME, "adamw", "none"),
    "drives momentum again": ("llama-tiny", PIPELINE, 0, NVME, "sgd", "full"),
    "activations": ("gpt-tiny", PIPELINE, 0, SAVED, "adamw", "none"),
    "activations momentum": ("llama-tiny", PIPELINE, 0, SAVED, "sgd", "none"),
    "activations again": ("gpt-tiny", PIPELINE, 0, SAVED, "adamw", "full"),
    "activations again but for products": ("llama-tiny", PIPELINE, 0, SAVED, "adamw", "op"),
    "activations of convolutions": ("vgg-tiny", PIPELINE, 0, SAVED, "sgd", "none"),
    "activations and states": ("llama-tiny", PIPELINE, 0, BOTH, "adamw", "none"),
}


def cluster_with_host():
    """Two processors with drives and a memory beside them that is described."""
    cluster = load_cluster("2xcpu")
    drives = Nvme(capacity_bytes=10**11, read_bytes_per_s=1e9, write_bytes_per_s=1e9)
    described = {"host_memory_bandwidth_bytes_per_s": 14e9, "nvme": drives}
    return replace(cluster, nodes=tuple(replace(node, **described) for node in cluster.nodes))


def plan_of(case, cluster):
    model, ranks, zero, offload, optimizer, again = CASES[case]
    graph = load_shipped_graph(model)
    count, chosen = len(graph.layers), recompute_choices(graph)[again]
    bounds = [count * place // len(ranks) for place in range(len(ranks) + 1)]
    return Plan(
        model=model,
        graph_hash=graph.content_hash,
        cluster=str(cluster),
        workload=Workload(global_batch=8, optimizer=Optimizer(kind=optimizer, momentum=optimizer == "sgd")),
        stages=tuple(
            StagePlan(start=start, stop=stop, ranks=own)
            for start, stop, own in zip(bounds[:-1], bounds[1:], ranks, strict=True)
        ),
        num_microbatches=4,
        recompute=chosen.ranges,
        keeps=chosen.keeps,
        exchange=GradientExchange(zero=zero, bucket_bytes=2**18),
        offload=offload,
    )


def find(folder):
    torch.set_default_dtype(torch.float32)
    path = folder / "cluster.json"
    if dist.get_rank() == 0:
        write_document(cluster_with_host(), path)
    dist.barrier()
    found = {}
    for case in CASES:
        plan = plan_of(case, path)
        own = measure_rank_peak(plan)
        every = [None, None]
        dist.all_gather_object(every, own)
        predicted = simulate_plan(plan, load_shipped_graph(plan.model), load_cluster(path)).peak_memory_bytes
        found[case] = [every, list(predicted)]
    return found


if __name__ == "__main__":
    write_results(find)
