"""Offload: what a plan keeps in host memory, or on NVMe drives of the host (`Nvme`), instead of device memory.

    optimizer   optimizer states and, in mixed precision, master weights. Gradients are copied to the host, the host
                makes the optimizer step, and new parameters are copied to the device (Ren et al., ZeRO-Offload, ATC
                2021). States on drives are read and written piece by piece, in parallel with the steps (Rajbhandari et
                al., ZeRO-Infinity, SC 2021)
    parameters  sharded parameters (zero 3) and their gradients. A layer's parameters are copied to the device for every
                pass, its gradients to the host after its backward (torch's FSDP2 with a CPUOffloadPolicy;
                ZeRO-Infinity)
    activations the tensors that a layer saves for its backward. They are copied to the host after the layer's forward,
                and back during the backward of the next layer (Rhu et al., vDNN, MICRO 2016; torchtune's
                OffloadActivations)

`program.host_offload` makes the instructions of an offloaded step, and counts the bytes on hosts and drives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, get_args

from meshwright.spec.errors import ClusterError, PlanError, suggest

if TYPE_CHECKING:
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvme:
    """All NVMe drives of a node together: capacity, and bandwidth of reads and of writes."""

    capacity_bytes: int
    read_bytes_per_s: float
    write_bytes_per_s: float

    def __post_init__(self) -> None:
        if not min(self.capacity_bytes, self.read_bytes_per_s, self.write_bytes_per_s) > 0:
            raise ClusterError(
                f"Drives of {self.capacity_bytes} bytes that read {self.read_bytes_per_s} B/s and write "
                f"{self.write_bytes_per_s} B/s are impossible; expected positive numbers. Leave `nvme` out if the node "
                "has no drives."
            )


Place = Literal["device", "host", "nvme"]
PLACES: tuple[Place, ...] = get_args(Place)
_WORDS = {"host": "on the host", "nvme": "on NVMe"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Where a plan keeps optimizer states between steps, parameters between passes, and saved activations.

    Each is on the "device" or in host memory ("host"); optimizer states may also be on drives ("nvme").
    """

    optimizer: Place = "device"
    parameters: Literal["device", "host"] = "device"
    activations: Literal["device", "host"] = "device"

    def __post_init__(self) -> None:
        if self.optimizer not in PLACES:
            raise PlanError(
                f"The optimizer's states were placed on {self.optimizer!r}{suggest(self.optimizer, PLACES)}; "
                f"expected {', '.join(PLACES)}."
            )
        for what, where in (("Parameters", self.parameters), ("Activations", self.activations)):
            if where not in PLACES[:2]:
                raise PlanError(
                    f"{what} were placed on {where!r}{suggest(where, PLACES[:2])}; expected {' or '.join(PLACES[:2])}."
                )
        if self.parameters == "host" and self.optimizer == "device":
            raise PlanError(
                "Parameters were placed on the host, but the states of the optimizer that updates them on the device; "
                "expected both to be offloaded. Add optimizer=host, or optimizer=nvme."
            )

    def describe(self) -> str:
        """Return words for people: ``optimizer states on the host``; empty if nothing is offloaded."""
        places: dict[str, list[str]] = {}
        for what, where in (
            ("parameters", self.parameters),
            ("optimizer states", self.optimizer),
            ("activations", self.activations),
        ):
            if where != "device":
                places.setdefault(where, []).append(what)
        return ", ".join(f"{_listed(what)} {_WORDS[where]}" for where, what in sorted(places.items()))


ON_DEVICE = Offload()


def _listed(words: list[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def read_offload(choices: Sequence[str]) -> Offload:
    """Parse texts such as ``optimizer=host`` or ``optimizer=nvme,activations=host``; ``none`` means no offload.

    Raises PlanError for any other text, and for contradicting choices.
    """
    known = tuple(field.name for field in fields(Offload))
    given: dict[str, str] = {}
    if [choice.strip() for choice in choices] == ["none"]:
        return ON_DEVICE
    for choice in ",".join(choices).split(",") if choices else ():
        what, equals, where = choice.strip().partition("=")
        if not equals or what not in known:
            raise PlanError(
                f"{choice.strip()!r} was given as what to offload"
                f"{'' if what in known else suggest(what, known)}; expected WHAT=WHERE, where WHAT is "
                f"{', '.join(known[:-1])} or {known[-1]}, and WHERE is host or nvme: for example optimizer=host."
            )
        if given.get(what, where) != where:
            raise PlanError(f"{what} was placed on {given[what]} and on {where}. Choose one of them.")
        given[what] = where
    return Offload(**given)  # type: ignore[arg-type]


def check_offload(offload: Offload, cluster: Cluster, num_ranks: int) -> None:
    """Raise ClusterError if a node of the first ``num_ranks`` devices lacks figures that an offloaded optimizer needs.

    These are the host's memory bandwidth and, for optimizer states on NVMe, the drives.
    """
    if offload.optimizer == "device":
        return
    for node in dict.fromkeys(cluster.nodes[cluster.node_index(rank)] for rank in range(num_ranks)):
        if not node.host_memory_bandwidth_bytes_per_s:
            raise ClusterError(
                f"Optimizer steps are to run on the host, but node {node.name!r} of cluster {cluster.name!r} does not "
                "give the host's memory bandwidth; expected the sum over its channels. Write "
                "host_memory_bandwidth_bytes_per_s = 400e9, or its own value, into the [[nodes]] of a cluster file."
            )
        if offload.optimizer == "nvme" and node.nvme is None:
            raise ClusterError(
                f"Optimizer states are to be kept on NVMe, but node {node.name!r} of cluster {cluster.name!r} has no "
                "drives; expected their size and rates, all of a node together. Write nvme = { capacity_bytes = "
                "15_000_000_000_000, read_bytes_per_s = 25e9, write_bytes_per_s = 15e9 }, or your own values, into the "
                "[[nodes]] of a cluster file."
            )


def check_offloaded_plan(plan: Plan) -> None:
    """Raise PlanError if the plan's offload is incompatible with its other choices."""
    if plan.offload == ON_DEVICE:
        return
    exchange, kept = plan.exchange, plan.offload.describe()
    steps = plan.offload.optimizer != "device"
    ways = {
        "an asynchronous schedule": plan.is_asynchronous,
        "replicas that step by themselves (every_steps)": exchange.every_steps > 1,
        "an exchange that continues in the next step (across_steps)": exchange.across_steps,
        "parameter servers": steps and bool(exchange.servers),
        "hierarchical all-reduces": steps and exchange.algorithm == "hierarchical",
    }
    chosen = next((name for name, is_chosen in ways.items() if is_chosen), None)
    if chosen:
        raise PlanError(
            f"The plan keeps {kept}, and has {chosen}; offload needs one optimizer step after all gradients of a step "
            "are summed. Leave one of the two out."
        )
    if plan.offload.parameters == "host" and exchange.zero < 3:
        raise PlanError(
            f"The plan keeps parameters on the host with zero = {exchange.zero}; expected zero = 3, which gathers "
            "parameters for every pass. Choose zero = 3, or keep parameters on the devices."
        )
    if plan.workload.kind != "training":
        raise PlanError(f"The plan is for inference, but keeps {kept}. Leave `offload` out.")
    if plan.offload.activations == "host" and plan.compiled:
        raise PlanError(
            f"The plan keeps {kept}, and compiles layers, for which torch's compiler chooses what is saved; expected "
            "layers that run eagerly. Leave out offload of activations, or compilation."
        )
