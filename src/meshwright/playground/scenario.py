"""The machines of a state: as described, and as the scenario changes them.

    base       nodes x devices of one kind, or a cluster from a file as it is
    scenario   the effects that the controls set: a slow device, slow links, NICs per node, memory per device

A plan is made for the base (that is where balanced cuts come from) and simulated on the scenario.
`simulator.scenarios` documents the effects, as for the files of `meshwright simulate --scenario`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshwright.cost import CostModel
from meshwright.playground.state import Controls
from meshwright.simulator.scenarios import apply_scenario
from meshwright.spec import Cluster, PlaygroundError, load_cluster, shipped_kinds
from meshwright.spec.errors import suggest
from meshwright.spec.quantities import Bytes
from meshwright.spec.scenario import DeviceMemory, Effect, NetworkCards, Scenario, SlowDevice, SlowLink
from meshwright.spec.selectors import Devices, Links

# Up to this number of devices, pictures are readable and answers are immediate.
MAX_DEVICES = 1024


def base_cluster(state: Controls, files: Mapping[str, Cluster]) -> Cluster:
    """The cluster that a state describes; ``files`` are clusters from files, by the name that stands for a kind.

    Raises PlaygroundError for an unknown kind, too many devices, or another size than a file's cluster has.
    """
    if state.kind in files:
        cluster = files[state.kind]
        shape = len(cluster.nodes), max(node.num_devices for node in cluster.nodes)
        if (state.num_nodes, state.devices_per_node) != shape:
            raise PlaygroundError(
                f"{state.kind} describes {shape[0]} nodes of at most {shape[1]} devices, but {state.num_nodes} nodes "
                f"of {state.devices_per_node} were asked for. Choose a shipped kind of device to change the numbers."
            )
        return cluster
    if state.kind not in shipped_kinds():
        known = (*shipped_kinds(), *files)
        raise PlaygroundError(f"There is no kind of device {state.kind[:40]!r}{suggest(state.kind[:40], known)}.")
    if state.num_nodes * state.devices_per_node > MAX_DEVICES:
        raise PlaygroundError(
            f"{state.num_nodes} nodes of {state.devices_per_node} devices were asked for; the playground answers up to "
            f"{MAX_DEVICES} devices. Use `meshwright plan` and `simulate` for larger clusters."
        )
    return load_cluster(f"{state.num_nodes}x{state.devices_per_node}x{state.kind}")


def scenario_of(state: Controls) -> Scenario:
    """The scenario that a state's controls set. Links between nodes do not matter with a single node."""
    effects = list[Effect]()
    if state.memory_gib:
        effects.append(DeviceMemory(memory=Bytes(max(1, int(state.memory_gib * 2**30)))))
    if state.link_slowdown != 1 and state.devices_per_node > 1:
        effects.append(SlowLink(links=Links("inside nodes"), factor=state.link_slowdown))
    if state.nic_slowdown != 1 and state.num_nodes > 1:
        effects.append(SlowLink(links=Links("between nodes"), factor=state.nic_slowdown))
    if state.num_nics:
        effects.append(NetworkCards(num_nics=state.num_nics))
    if state.slowdown != 1:
        effects.append(SlowDevice(devices=Devices(f"rank {state.slow_rank}"), factor=state.slowdown))
    return Scenario(effects=tuple(effects))


def scenario_cost(state: Controls, cost: CostModel) -> CostModel:
    """The cost model of the base as the scenario changes it.

    Raises PlaygroundError for a slow device that is not there.
    """
    num_ranks = cost.cluster.num_ranks
    if state.slowdown != 1 and state.slow_rank >= num_ranks:
        raise PlaygroundError(
            f"Device {state.slow_rank} was chosen as the slow one, but the cluster has devices 0 to {num_ranks - 1}. "
            "Choose one of them."
        )
    return apply_scenario(cost, scenario_of(state))


def state_of_cluster(reference: str) -> tuple[Controls, dict[str, Cluster]]:
    """The state on a cluster that a plan names, and the clusters to offer beside the shipped kinds.

    Raises ClusterError for a reference that cannot be read.
    """
    cluster = load_cluster(reference)
    num_nodes, num_devices = len(cluster.nodes), max(node.num_devices for node in cluster.nodes)
    kind, offered = cluster.device_kinds[0].name, {}
    if kind not in shipped_kinds() or load_cluster(f"{num_nodes}x{num_devices}x{kind}").nodes != cluster.nodes:
        kind = reference
        offered[reference] = replace(cluster, name=reference)
    return Controls(kind=kind, num_nodes=num_nodes, devices_per_node=num_devices), offered
