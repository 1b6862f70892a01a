"""Memory that a model needs with recomputation, sharding or offload: rows for ``show --memory``.

The whole model is one stage, replicated on all ranks of a cluster (data parallelism, with ZeRO), with one microbatch in
flight. The choices of recomputation are those of `recompute_choices`. The simulation of a `Plan` gives the same
figures, except that its activations stay on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwright.cost.memory.memory_options import MemoryOptions, weigh_rank
from meshwright.cost.memory.stage_memory import backend_of, weigh_stage
from meshwright.spec import Cluster, Graph, GraphError, Workload, recompute_choices, slice_graph, with_recompute

if TYPE_CHECKING:
    from meshwright.spec.recompute import RecomputeName

Row = dict[str, Any]


def layer_rows(graph: Graph, batch_size: int, workload: Workload, cluster: Cluster) -> list[Row]:
    """Return one row per layer, with the bytes that it needs under each choice of recomputation.

    Keys: ``layer``, ``parameters_bytes``, and for each choice the bytes that a microbatch saves for the backward
    (``none_bytes`` ...). A value that is made in one layer and read in another counts for the former. Raises GraphError
    as `weigh_stage` does, and for inference graphs.
    """
    _check_trains(graph)
    device = backend_of(cluster.device_kind(0))
    choices = {name: with_recompute(graph, *again) for name, again in recompute_choices(graph).items()}
    rows = []
    for layer in slice_graph(graph, [(index, index + 1) for index in range(len(graph.layers))]):
        kept = {
            f"{name}_bytes": weigh_stage(chosen, layer, batch_size, workload, device=device).phases.forward.after_bytes
            for name, chosen in choices.items()
        }
        weights = sum(graph.tensors[i].num_bytes(0, workload.float_bytes) for i in layer.parameters)
        rows.append({"layer": graph.layers[layer.index].name, "parameters_bytes": weights, **kept})
    return rows


def choice_rows(graph: Graph, batch_size: int, workload: Workload, cluster: Cluster) -> list[Row]:
    """Return one row per combination of ZeRO stage, recomputation and offload, with a rank's memory.

    Keys: ``zero`` (0 to 3), ``recompute``, ``offload`` ("nothing", "states", or "both": states and activations, in host
    memory), ``device_bytes`` (the peak), ``parameters_bytes``, ``gradients_bytes``, ``states_bytes`` and
    ``activations_bytes`` (each at its maximum, possibly at different moments), ``host_bytes``, and ``transfer_s``:
    seconds per step on PCIe. Raises GraphError as `layer_rows` does.
    """
    _check_trains(graph)
    kind, pcie = cluster.device_kind(0), cluster.nodes[0].pcie
    (stage,) = slice_graph(graph, [(0, len(graph.layers))])
    choices = {name: with_recompute(graph, *again) for name, again in recompute_choices(graph).items()}
    ways: list[tuple[int, RecomputeName, str]] = [(zero, name, "") for name in choices for zero in range(4)]
    ways += [(2, "full", "states"), (3, "full", "both")]
    rows = []
    for zero, name, offload in ways:
        options = MemoryOptions(
            num_ranks=cluster.num_ranks,
            zero=zero,  # type: ignore[arg-type]
            states_on="host" if offload else "device",
            activations_on="host" if offload == "both" else "device",
        )
        found = weigh_rank(choices[name], stage, batch_size, workload, options, device=backend_of(kind))
        rows.append(
            {
                "zero": zero,
                "recompute": name,
                "offload": offload or "nothing",
                "device_bytes": found.device_bytes,
                "parameters_bytes": found.parameter_bytes,
                "gradients_bytes": found.gradient_bytes,
                "states_bytes": found.optimizer_bytes,
                "activations_bytes": found.activation_bytes,
                "host_bytes": found.host_bytes,
                "transfer_s": found.moving_seconds(pcie),
            }
        )
    return rows


def _check_trains(graph: Graph) -> None:
    if graph.mode != "training":
        raise GraphError(
            f"Graph {graph.name!r} is for inference; recomputation, sharding and offload are compared for training. "
            "Capture the model for training."
        )
