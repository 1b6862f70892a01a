"""Scenario: changes of a cluster, and events during a run on it, as a list of effects that apply in order.

    SlowDevice       devices compute slower, for good or for a while
    OtherDevice      devices are replaced by another kind
    DeviceMemory     devices have more or less memory
    SlowLink         links have another bandwidth or latency, for good or for a while
    NetworkCards     nodes have more or fewer NICs, which their devices share
    Oversubscription racks whose uplinks carry less than their NICs
    Jitter           every computation or transfer takes its time times a random factor
    LostDevice       devices are missing for a while
    Failures         devices or nodes fail at random, or at given times
    Checkpoints      how often the training state is saved, and what saving and resuming cost
    Price            money per hour of devices or nodes

`meshwright.simulator.scenarios` applies the effects. Quantities have units (`spec.units`); devices and links are
selected by short texts (`spec.selectors`). All random choices follow from ``seed``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from meshwright.spec.bounds import check_bounds
from meshwright.spec.codec import decode_document
from meshwright.spec.errors import DocumentError, ScenarioError, suggest
from meshwright.spec.parsing import read_data
from meshwright.spec.selectors import Devices, Links
from meshwright.spec.units import Bytes, BytesPerSecond, Seconds

T = TypeVar("T")

ALL = Devices("all")
NO_TIME = Seconds(0)


_check = partial(check_bounds, ScenarioError)


def _check_while(kind: str, since: float, until: float | None) -> None:
    if until is not None and until <= since:
        raise ScenarioError(f"{kind}: until is {until:g} s and since is {since:g} s; expected an end after the start.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowDevice:
    """Computations on ``devices`` take ``factor`` times as long, from time ``since`` to ``until`` of the run.

    Without ``until``, they take longer to the end.
    """

    KIND: ClassVar = "slow-device"
    devices: Devices
    factor: float
    since: Seconds = NO_TIME
    until: Seconds | None = None

    def __post_init__(self) -> None:
        _check(self.KIND, factor=(1e-3, self.factor, 1e6))
        _check_while(self.KIND, self.since, self.until)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherDevice:
    """``devices`` are replaced by the shipped device kind ``device``; the links of their nodes do not change."""

    KIND: ClassVar = "other-device"
    devices: Devices
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """``devices`` have ``memory`` bytes of memory each."""

    KIND: ClassVar = "device-memory"
    memory: Bytes
    devices: Devices = ALL

    def __post_init__(self) -> None:
        _check(self.KIND, memory=(1, self.memory, 1e18))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink:
    """``links`` get another ``bandwidth`` or ``latency``, or become ``factor`` times as slow in both.

    At least one of the three is given; they can be combined. The change holds from ``since`` to ``until`` of the run.
    """

    KIND: ClassVar = "slow-link"
    links: Links
    factor: float | None = None
    bandwidth: BytesPerSecond | None = None
    latency: Seconds | None = None
    since: Seconds = NO_TIME
    until: Seconds | None = None

    def __post_init__(self) -> None:
        _check(self.KIND, factor=(1e-6, self.factor, 1e6), bandwidth=(1, self.bandwidth, 1e18))
        _check_while(self.KIND, self.since, self.until)
        if self.factor is None and self.bandwidth is None and self.latency is None:
            raise ScenarioError(f"{self.KIND}: nothing is changed; give factor, bandwidth or latency.")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkCards:
    """Every node has ``num_nics`` NICs, which its devices share."""

    KIND: ClassVar = "network-cards"
    num_nics: int

    def __post_init__(self) -> None:
        _check(self.KIND, num_nics=(1, self.num_nics, 1024))


@dataclass(frozen=True, slots=True, kw_only=True)
class Oversubscription:
    """Racks of ``nodes_per_rack`` nodes, whose uplinks have the bandwidth of all NICs of the rack divided by ``ratio``.

    ``latency`` is that of an uplink.
    """

    KIND: ClassVar = "oversubscription"
    nodes_per_rack: int
    ratio: float
    latency: Seconds = NO_TIME

    def __post_init__(self) -> None:
        _check(self.KIND, nodes_per_rack=(1, self.nodes_per_rack, 1e6), ratio=(1, self.ratio, 1e6))


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter:
    """Times on ``devices`` are multiplied by a random factor exp(``spread`` · N(0, 1)).

    With ``straggler_probability``, a time is multiplied by ``straggler_factor`` as well. ``of`` selects computations,
    transfers or both. ``per`` "instruction" draws a factor for every instruction, "step" one for all computations of a
    device in a step. A gradient reduction has one factor for all its ranks.
    """

    KIND: ClassVar = "jitter"
    devices: Devices = ALL
    spread: float = 0.0
    straggler_probability: float = 0.0
    straggler_factor: float = 1.0
    of: Literal["computations", "transfers", "all"] = "computations"
    per: Literal["instruction", "step"] = "instruction"

    def __post_init__(self) -> None:
        _check(
            self.KIND,
            spread=(0, self.spread, 2),
            straggler_probability=(0, self.straggler_probability, 1),
            straggler_factor=(1e-3, self.straggler_factor, 1e6),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LostDevice:
    """``devices`` are missing from time ``since`` to ``until`` of the run; without ``until`` they do not return.

    Meanwhile the run waits (``then`` "wait"), or continues with a new plan for the other devices ("replan").
    """

    KIND: ClassVar = "lost-device"
    devices: Devices
    since: Seconds = NO_TIME
    until: Seconds | None = None
    then: Literal["wait", "replan"] = "wait"

    def __post_init__(self) -> None:
        _check_while(self.KIND, self.since, self.until)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Devices or nodes (``of``) fail, at random or at given times, and return after the time ``repair``.

    Either ``mttf`` is given, the mean time to failure of one device or node: times to failure are exponentially
    distributed, or by Weibull's law with ``shape`` (below 1: early failures are more frequent). Or ``times`` lists the
    times of the run at which a device or node fails.
    """

    KIND: ClassVar = "failures"
    of: Literal["device", "node"] = "device"
    mttf: Seconds | None = None
    shape: float = 1.0
    times: tuple[Seconds, ...] = ()
    repair: Seconds = NO_TIME

    def __post_init__(self) -> None:
        _check(self.KIND, mttf=(1e-3, self.mttf, 1e12), shape=(0.1, self.shape, 10))
        if (self.mttf is None) == (not self.times):
            raise ScenarioError(f"{self.KIND}: give exactly one of mttf and times.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """The training state is saved after every ``interval`` of work; by default, after the interval that costs least.

    Saving takes the time ``cost``, or the size of the state divided by ``bandwidth``; nothing is computed meanwhile.
    After a failure, the times ``detection``, repair and ``restart`` pass; then work continues from the last checkpoint.
    """

    KIND: ClassVar = "checkpoints"
    interval: Seconds | None = None
    cost: Seconds | None = None
    bandwidth: BytesPerSecond | None = None
    detection: Seconds = NO_TIME
    restart: Seconds = NO_TIME

    def __post_init__(self) -> None:
        _check(self.KIND, interval=(1e-6, self.interval, 1e12), bandwidth=(1, self.bandwidth, 1e18))
        if (self.cost is None) == (self.bandwidth is None):
            raise ScenarioError(
                f"{self.KIND}: give either cost (the time to save the state) or bandwidth (that of the storage)."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The price of a device or a node (``of``) per hour.

    ``device`` names the kind of device to which the price applies; by default it applies to all kinds.
    """

    KIND: ClassVar = "price"
    per_hour: float
    of: Literal["device", "node"] = "device"
    device: str = ""
    currency: str = "USD"

    def __post_init__(self) -> None:
        _check(self.KIND, per_hour=(0, self.per_hour, 1e9))


def is_active(effect: SlowDevice | SlowLink | LostDevice, at_s: float) -> bool:
    """Return whether an effect with times holds ``at_s`` seconds after the start of the run."""
    return effect.since <= at_s and (effect.until is None or at_s < effect.until)


Effect = (
    SlowDevice
    | OtherDevice
    | DeviceMemory
    | SlowLink
    | NetworkCards
    | Oversubscription
    | Jitter
    | LostDevice
    | Failures
    | Checkpoints
    | Price
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Effects in the order in which they apply, and the ``seed`` of random choices.

    ``origins`` has the file of each effect and its number in that file, for messages; empty without files.
    """

    name: str = ""
    seed: int | None = None
    effects: tuple[Effect, ...] = ()
    notes: str = ""
    origins: tuple[str, ...] = field(default=(), init=False, compare=False, repr=False)

    SCHEMA_VERSION: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ScenarioError(f"seed is {self.seed}; expected a whole number, 0 to 2^63 - 1.")

    def effects_of(self, *kinds: type[T]) -> tuple[T, ...]:
        """Return the effects that are instances of ``kinds``, in order."""
        return tuple(effect for effect in self.effects if isinstance(effect, kinds))

    def moments(self) -> list[float]:
        """Return when effects begin or end, in seconds of the run, ascending; the first is 0."""
        timed = [effect for effect in self.effects if isinstance(effect, SlowDevice | SlowLink | LostDevice)]
        ends = [effect.until for effect in timed if effect.until is not None]
        return sorted({0.0, *map(float, ends), *(float(effect.since) for effect in timed)})

    def only(self, *kinds: type[object]) -> Scenario:
        """Return the scenario with only those effects that are instances of ``kinds``."""
        kept = [place for place, effect in enumerate(self.effects) if isinstance(effect, kinds)]
        copy = replace(self, effects=tuple(self.effects[place] for place in kept))
        return copy.read_from([self.origins[place] for place in kept] if self.origins else ())

    def read_from(self, origins: Sequence[str]) -> Scenario:
        """Return a copy of the scenario with ``origins`` set."""
        copy = replace(self)
        object.__setattr__(copy, "origins", tuple(origins))
        return copy

    @contextmanager
    def naming(self, place: int, key: str) -> Iterator[None]:
        """Prefix the message of a ScenarioError raised in the block with effect number ``place`` and its ``key``."""
        try:
            yield
        except ScenarioError as error:
            raise ScenarioError(f"{self.origin(place)} ({self.effects[place].KIND}).{key}: {error}") from None

    def origin(self, place: int) -> str:
        """Return the file of an effect and its number there, or its number alone."""
        return self.origins[place] if self.origins else f"effects[{place}]"


def compose(scenarios: Sequence[Scenario]) -> Scenario:
    """Combine scenarios into one: all effects in sequence, and the seed of the last scenario that has a seed."""
    seeds = [scenario.seed for scenario in scenarios if scenario.seed is not None]
    origins = [
        scenario.origins[place] if scenario.origins else f"{scenario.name or 'scenario'}.effects[{place}]"
        for scenario in scenarios
        for place in range(len(scenario.effects))
    ]
    return Scenario(
        name=" + ".join(scenario.name for scenario in scenarios if scenario.name),
        seed=seeds[-1] if seeds else None,
        effects=tuple(effect for scenario in scenarios for effect in scenario.effects),
    ).read_from(origins)


def load_scenario(reference: str | Path) -> Scenario:
    """Read a scenario from a TOML or JSON file, or a shipped scenario by its name.

    Raises DocumentError or ScenarioError, naming the file and the key, for an invalid file.
    """
    path = Path(reference)
    if path.suffix in (".toml", ".json"):
        return _read(path, str(path))
    if str(reference) not in shipped_scenarios():
        raise DocumentError(
            f"No scenario {str(reference)!r} is shipped{suggest(str(reference), shipped_scenarios())}. Give one of "
            "these names or a .toml file."
        )
    with resources.as_file(resources.files("meshwright.spec") / "scenarios" / f"{reference}.toml") as shipped:
        return _read(shipped, shipped.name)


def load_scenarios(references: Sequence[str] | None) -> Scenario:
    """Load the named scenarios and combine them into one, in the given order."""
    return compose([load_scenario(reference) for reference in references or ()])


def shipped_scenarios() -> tuple[str, ...]:
    """Return the names of the scenarios that ship with Meshwright, sorted."""
    folder = resources.files("meshwright.spec") / "scenarios"
    return tuple(sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml")))


def _read(path: Path, where: str) -> Scenario:
    try:
        scenario = decode_document(Scenario, read_data(path), where)
    except ScenarioError as error:
        raise ScenarioError(f"{where}: {error}") from None
    named = scenario if scenario.name else replace(scenario, name=path.stem)
    return named.read_from([f"{where}.effects[{place}]" for place in range(len(scenario.effects))])
