"""Memory needs of a model on a device with recomputation, sharding or offload: rows for ``show --memory``.

The whole model is one stage, held by all ranks of a cluster (ZeRO's data parallelism), for one microbatch in flight.
Recomputation follows the words of `recompute_choices`. A simulated `Plan` gives the same figures, except that
activations stay on the device there.
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
    """Return one row per layer.

    Keys: ``layer``, ``parameters_bytes``, and bytes that a microbatch keeps per choice (``none_bytes`` ...). Values
    that a layer gets from another one count where they are made. Raises GraphError as `weigh_stage` does.
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
    """Return one row per way to keep the model on a rank of the cluster.

    Keys: ``zero`` (0 to 3), ``recompute``, ``offload`` to the host (nothing, states, or both: states and activations),
    ``device_bytes`` (the peak), its ``parameters_bytes``, ``gradients_bytes``, ``states_bytes`` and
    ``activations_bytes`` (each at its maximum, possibly at different moments), ``host_bytes``, and ``transfer_s``, the
    seconds per step on PCIe.
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
            f"Graph {graph.name!r} is for inference; expected one for training, to compare recomputation, sharding and "
            "offload. Capture the model for training."
        )
