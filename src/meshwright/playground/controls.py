"""The state of the playground: the values of all controls (`Controls`), and the link that contains them.

A state describes model, cluster, plan and scenario by small values. `to_query` writes all of them, so that a link shows
the same state later. `from_query` reads untrusted text: it returns a state with every value within `LIMITS`, or raises
PlaygroundError. Whether the values are consistent (does the batch divide, are there enough layers) is checked where
they are used. `base_cluster` and `scenario_of` return the cluster and the scenario of a state.

A control with the value `AS_PLANNED` takes its value from the opened plan, which ``given`` identifies by a hash. So a
link never names a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, get_args
from urllib.parse import parse_qsl, urlencode

from meshwright.cost import CostModel
from meshwright.planner.rank_layouts import LayoutName
from meshwright.simulator.scenarios import apply_scenario
from meshwright.spec import Cluster, PlaygroundError, load_cluster, shipped_kinds, suggest
from meshwright.spec.precision import Precision
from meshwright.spec.recompute import OLDER_NAMES, RECOMPUTE_NAMES
from meshwright.spec.scenario import DeviceMemory, Effect, NetworkCards, Scenario, SlowDevice, SlowLink
from meshwright.spec.schedules import SCHEDULE_NAMES
from meshwright.spec.selectors import Devices, Links
from meshwright.spec.units import Bytes
from meshwright.spec.workload import OptimizerName

# A part of the plan that no other value of the control can express.
AS_PLANNED = "as-planned"
# Values of the control for everything without its own control.
REST_NAMES = ("none", AS_PLANNED)
OFFLOAD_NAMES = (
    "none",
    "optimizer=host",
    "optimizer=nvme",
    "optimizer=host,parameters=host",
    "optimizer=nvme,parameters=host",
    "activations=host",
    "optimizer=host,activations=host",
    "optimizer=nvme,activations=host",
    "optimizer=host,parameters=host,activations=host",
    "optimizer=nvme,parameters=host,activations=host",
)
# A link is read whole before anything else; values of all controls take some hundred characters.
MAX_QUERY_LENGTH = 8000
# Lowest and highest value by name in a link. They keep a state small enough to be answered at once; a larger cluster is
# for `meshwright plan` and `simulate`.
LIMITS: dict[str, tuple[float, float]] = {
    "nodes": (1, 1024),
    "devices": (1, 1024),
    "nics": (0, 64),
    "batch": (1, 2**24),
    "microbatch": (1, 65_536),
    "stages": (1, 256),
    "chunks": (1, 64),
    "zero": (0, 3),
    "tensor": (1, 1024),
    "context": (1, 1024),
    "expert": (1, 1024),
    "bucket": (1e-7, 65_536),
    "slow": (0, 1023),
    "slowdown": (0.1, 100),
    "link": (0.1, 100),
    "nic": (0.1, 100),
    "memory": (0, 4096),
}
MAX_NAME_LENGTH = 300
_MAX_REPLICAS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Controls:
    """The state of the playground: the values of all controls.

    ``given``: the hash of the opened plan, or "". ``kind``: a shipped kind of device, or the name of a cluster from a
    file. ``replicas``: one number for all stages, or one per stage; (): the most that devices and microbatches allow.
    ``cuts``: the first layer of each stage but the first; (): balanced cuts. ``num_chunks``: stages per rank under
    schedules that assign stages to ranks in turn (interleaved). ``rest``: all properties without a control (details of
    the gradient reduction, placements of ops, the loader): `AS_PLANNED` or "none". ``layout``, ``schedule`` and
    ``recompute`` may be `AS_PLANNED`, too. ``num_nics`` and ``memory_gib``: per node and per device; 0: the value of
    the datasheet. ``slowdown``: the factor by which device ``slow_rank`` is slower; ``link_slowdown`` and
    ``nic_slowdown``: the same for all links inside nodes and between nodes; 1: as in the datasheet.
    """

    model: str = "gpt2-small"
    given: str = ""
    kind: str = "A100"
    num_nodes: int = 2
    devices_per_node: int = 8
    num_nics: int = 0
    global_batch: int = 128
    microbatch_size: int = 4
    num_stages: int = 4
    replicas: tuple[int, ...] = ()
    layout: str = "stage-major"
    cuts: tuple[int, ...] = ()
    schedule: str = "1f1b"
    num_chunks: int = 2
    zero: int = 0
    tensor: int = 1
    context: int = 1
    expert: int = 1
    sequence_parallel: bool = False
    recompute: str = "none"
    offload: str = "none"
    rest: str = "none"
    overlap: bool = True
    bucket_mib: float = 25.0
    precision: Precision = "mixed"
    optimizer: OptimizerName = "adamw"
    slow_rank: int = 0
    slowdown: float = 1.0
    link_slowdown: float = 1.0
    nic_slowdown: float = 1.0
    memory_gib: float = 0.0

    @property
    def needs_plan(self) -> bool:
        """True if a control takes its value from the opened plan (`AS_PLANNED`)."""
        return AS_PLANNED in (self.layout, self.schedule, self.recompute, self.rest)


def to_query(state: Controls) -> str:
    """Return a state as the query of a link (``name=value&…``), with the values of all controls."""
    return urlencode([(item.name, item.write(getattr(state, item.field))) for item in _PARAMETERS])


def from_query(query: str) -> Controls:
    """Return the state of a link's query; missing values are the defaults of `Controls`.

    Raises PlaygroundError, which names the value, for unknown or repeated names and for values out of range.
    """
    if len(query) > MAX_QUERY_LENGTH:
        raise PlaygroundError(
            f"The link has {len(query)} characters; expected at most {MAX_QUERY_LENGTH}. Set the controls by hand."
        )
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), errors="strict", max_num_fields=64)
    except ValueError as error:
        raise PlaygroundError(f"The link cannot be read ({error}). Copy it again, whole.") from None
    known = {item.name: item for item in _PARAMETERS}
    values: dict[str, Any] = {}
    for name, text in pairs:
        if name not in known:
            raise PlaygroundError(f"The link sets {_quote(name)}, which is not a control{suggest(name[:40], known)}.")
        if known[name].field in values:
            raise PlaygroundError(f"The link sets {name!r} twice; keep one of them.")
        values[known[name].field] = known[name].read(name, text)
    return Controls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parameter:
    """One control: its name in a link, its field, and how its text is read and written."""

    name: str
    field: str
    read: Callable[[str, str], Any]
    write: Callable[[Any], str] = str


def _quote(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "…")


def _refuse(name: str, text: str, expected: str) -> PlaygroundError:
    return PlaygroundError(f"{name} = {_quote(text)} was given; expected {expected}.")


def _read_whole(name: str, text: str) -> int:
    low, high = LIMITS[name]
    if not re.fullmatch(r"[0-9]{1,9}", text) or not low <= int(text) <= high:
        raise _refuse(name, text, f"a whole number from {low:g} to {high:,.0f}")
    return int(text)


def _read_number(name: str, text: str) -> float:
    low, high = LIMITS[name]
    if not re.fullmatch(r"[0-9]{1,5}(\.[0-9]{1,25})?", text) or not low <= float(text) <= high:
        raise _refuse(name, text, f"a number from {low:g} to {high:g}")
    return float(text)


def _read_wholes(name: str, text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if len(parts) > LIMITS["stages"][1] or not all(re.fullmatch(r"[0-9]{1,6}", part) for part in parts):
        raise _refuse(name, text, "whole numbers with commas between them")
    return tuple(int(part) for part in parts)


def _read_replicas(name: str, text: str) -> tuple[int, ...]:
    if text == "auto":
        return ()
    replicas = _read_wholes(name, text)
    if not all(1 <= count <= _MAX_REPLICAS for count in replicas):
        raise _refuse(name, text, f"1 to {_MAX_REPLICAS} replicas for all stages, or for each of them, or auto")
    return replicas


def _read_cuts(name: str, text: str) -> tuple[int, ...]:
    return () if text == "balanced" else _read_wholes(name, text)


def _read_model(name: str, text: str) -> str:
    if not text or len(text) > MAX_NAME_LENGTH or not text.isprintable():
        raise _refuse(name, text, "the name of a model")
    return text


def _read_given(name: str, text: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{16}|none", text):
        raise _refuse(name, text, "the 16 hexadecimal digits of a plan, or none")
    return "" if text == "none" else text


def _read_choice(*choices: str) -> Callable[[str, str], str]:
    def read(name: str, text: str) -> str:
        if text not in choices:
            raise _refuse(name, text, f"one of {', '.join(choices)}")
        return text

    return read


def _read_recompute(name: str, text: str) -> str:
    """Read recompute, also the words of older links."""
    return _read_choice(*RECOMPUTE_NAMES, AS_PLANNED)(name, OLDER_NAMES.get(text, text))


def _read_switch(name: str, text: str) -> bool:
    return _read_choice("on", "off")(name, text) == "on"


def _write_number(value: float) -> str:
    return f"{Decimal(repr(float(value))):f}".removesuffix(".0")


def _write_switch(on: bool) -> str:
    return "on" if on else "off"


def _write_wholes(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))


_PARAMETERS = (
    _Parameter(name="model", field="model", read=_read_model),
    _Parameter(name="plan", field="given", read=_read_given, write=lambda key: key or "none"),
    _Parameter(name="kind", field="kind", read=_read_model),
    _Parameter(name="nodes", field="num_nodes", read=_read_whole),
    _Parameter(name="devices", field="devices_per_node", read=_read_whole),
    _Parameter(name="nics", field="num_nics", read=_read_whole),
    _Parameter(name="batch", field="global_batch", read=_read_whole),
    _Parameter(name="microbatch", field="microbatch_size", read=_read_whole),
    _Parameter(name="stages", field="num_stages", read=_read_whole),
    _Parameter(
        name="replicas", field="replicas", read=_read_replicas, write=lambda counts: _write_wholes(counts) or "auto"
    ),
    _Parameter(name="layout", field="layout", read=_read_choice(*get_args(LayoutName), AS_PLANNED)),
    _Parameter(name="cuts", field="cuts", read=_read_cuts, write=lambda cuts: _write_wholes(cuts) or "balanced"),
    _Parameter(name="schedule", field="schedule", read=_read_choice(*SCHEDULE_NAMES, AS_PLANNED)),
    _Parameter(name="chunks", field="num_chunks", read=_read_whole),
    _Parameter(name="zero", field="zero", read=_read_whole),
    _Parameter(name="tensor", field="tensor", read=_read_whole),
    _Parameter(name="context", field="context", read=_read_whole),
    _Parameter(name="expert", field="expert", read=_read_whole),
    _Parameter(name="sequence", field="sequence_parallel", read=_read_switch, write=_write_switch),
    _Parameter(name="recompute", field="recompute", read=_read_recompute),
    _Parameter(name="offload", field="offload", read=_read_choice(*OFFLOAD_NAMES)),
    _Parameter(name="rest", field="rest", read=_read_choice(*REST_NAMES)),
    _Parameter(name="overlap", field="overlap", read=_read_switch, write=_write_switch),
    _Parameter(name="bucket", field="bucket_mib", read=_read_number, write=_write_number),
    _Parameter(name="precision", field="precision", read=_read_choice(*get_args(Precision))),
    _Parameter(name="optimizer", field="optimizer", read=_read_choice(*get_args(OptimizerName))),
    _Parameter(name="slow", field="slow_rank", read=_read_whole),
    _Parameter(name="slowdown", field="slowdown", read=_read_number, write=_write_number),
    _Parameter(name="link", field="link_slowdown", read=_read_number, write=_write_number),
    _Parameter(name="nic", field="nic_slowdown", read=_read_number, write=_write_number),
    _Parameter(name="memory", field="memory_gib", read=_read_number, write=_write_number),
)


# Up to this number of devices, pictures are readable and answers are immediate.
MAX_DEVICES = 1024


# The base is nodes x devices of one kind, or a cluster from a file as it is. The scenario adds effects that the
# controls set: a slow device, slow links, NICs per node, memory per device. A plan is made for the base (that is where
# balanced cuts come from) and simulated on the scenario. `simulator.scenarios` documents the effects, as for the files
# of `meshwright simulate --scenario`.
def base_cluster(state: Controls, files: Mapping[str, Cluster]) -> Cluster:
    """Return the cluster of a state, without its scenario.

    ``files``: clusters from files, by the name that ``state.kind`` has for them. Raises PlaygroundError for an unknown
    kind of device, for too many devices, and for numbers of nodes or devices that differ from those of the file.
    """
    if state.kind in files:
        cluster = files[state.kind]
        shape = len(cluster.nodes), max(node.num_devices for node in cluster.nodes)
        if (state.num_nodes, state.devices_per_node) != shape:
            raise PlaygroundError(
                f"{state.kind} describes {shape[0]} nodes of at most {shape[1]} devices, but {state.num_nodes} nodes "
                f"of {state.devices_per_node} were given. Choose a shipped kind of device to change the numbers."
            )
        return cluster
    if state.kind not in shipped_kinds():
        known = (*shipped_kinds(), *files)
        raise PlaygroundError(f"Unknown kind of device {state.kind[:40]!r}{suggest(state.kind[:40], known)}.")
    if state.num_nodes * state.devices_per_node > MAX_DEVICES:
        raise PlaygroundError(
            f"{state.num_nodes} nodes of {state.devices_per_node} devices were given; the playground simulates up to "
            f"{MAX_DEVICES} devices. Use `meshwright plan` and `simulate` for larger clusters."
        )
    return load_cluster(f"{state.num_nodes}x{state.devices_per_node}x{state.kind}")


def scenario_of(state: Controls) -> Scenario:
    """Return the scenario of a state: slow device and links, NICs per node, memory per device.

    Slowdowns of links that the cluster does not have (between nodes with a single node, inside nodes with one device)
    are left out.
    """
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
    """Return a cost model changed by the state's scenario; ``cost`` is that of the cluster without a scenario.

    Raises PlaygroundError if the cluster does not have the slow device.
    """
    num_ranks = cost.cluster.num_ranks
    if state.slowdown != 1 and state.slow_rank >= num_ranks:
        raise PlaygroundError(
            f"Device {state.slow_rank} was chosen as the slow one, but the cluster has devices 0 to {num_ranks - 1}. "
            "Choose one of them."
        )
    return apply_scenario(cost, scenario_of(state))


def state_of_cluster(reference: str) -> tuple[Controls, dict[str, Cluster]]:
    """Return a default state on the cluster ``reference``, and clusters to offer beside the shipped kinds of devices.

    ``reference``: a cluster's name or file, as in `load_cluster`. The second result has the cluster by ``reference`` if
    it is not made of nodes of one shipped kind; else it is empty. Raises ClusterError for an invalid reference.
    """
    cluster = load_cluster(reference)
    num_nodes, num_devices = len(cluster.nodes), max(node.num_devices for node in cluster.nodes)
    kind, offered = cluster.device_kinds[0].name, {}
    if kind not in shipped_kinds() or load_cluster(f"{num_nodes}x{num_devices}x{kind}").nodes != cluster.nodes:
        kind = reference
        offered[reference] = replace(cluster, name=reference)
    return Controls(kind=kind, num_nodes=num_nodes, devices_per_node=num_devices), offered
