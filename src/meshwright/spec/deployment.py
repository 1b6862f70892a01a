"""Deployment: models that are served under deadlines, the devices that serve them, and the requests that arrive.

    Latency    l(b) = α b + β seconds for a batch of b, or lines between measured sizes, up to a largest batch
    Arrivals   Poisson · Gamma (bursts) · Diurnal (a daily wave) · Trace (a file of arrival times)
    Trouble    Straggler · Outage: failures of devices
    Server     the address of the server, and its limits (`meshwright.spec.server`)
    Group      some of the devices, and the models that they hold
    Query      a tree of calls, each to a model
    Trunk      the first layers of several models, which differ in their heads
    Scaling    the number of devices follows the arrivals

All devices of a deployment are alike, except that a `Straggler` is slower. Each device holds all models or, in a
deployment with groups, the models of its group. Rates are requests per second.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from meshwright.spec.bounds import check_bounds
from meshwright.spec.codec import decode_document, write_document
from meshwright.spec.errors import DocumentError, ServingError, suggest
from meshwright.spec.groups import MOST_DEVICES, Group, check_groups, check_memory
from meshwright.spec.joint_models import MOST_RATE, Query, Trunk
from meshwright.spec.latency import LONGEST, NO_TIME, Latency
from meshwright.spec.own_code import split_reference
from meshwright.spec.parsing import read_data
from meshwright.spec.scaling import Scaling, check_scaling
from meshwright.spec.server import Server
from meshwright.spec.units import Bytes, Seconds

_YEAR = 366 * LONGEST
A_DAY = Seconds(86_400.0)
# The tolerance of sums of bytes.
_ROUNDING = 1 + 1e-9
_SERVER = Server()
MOST_MODELS, LARGEST_SAMPLE = 100_000, 2**30
_check = partial(check_bounds, ServingError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Poisson:
    """Poisson arrivals: ``rate`` requests per second on average, independent of each other."""

    KIND: ClassVar = "poisson"
    rate: float

    def __post_init__(self) -> None:
        _check("Poisson arrivals", rate=(0.0, self.rate, MOST_RATE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gamma:
    """Arrivals whose gaps have a gamma distribution: ``rate`` requests per second on average.

    The squared coefficient of variation of the gaps is 1 / ``shape``. Shape 1 is Poisson; 0.1 gives bursts.
    """

    KIND: ClassVar = "gamma"
    rate: float
    shape: float

    def __post_init__(self) -> None:
        _check("Gamma arrivals", rate=(0.0, self.rate, MOST_RATE), shape=(1e-3, self.shape, 1e3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Diurnal:
    """Poisson arrivals whose rate follows a cosine between ``low`` and ``high`` (requests per second).

    The rate is ``low`` at the start and after every ``period``.
    """

    KIND: ClassVar = "diurnal"
    low: float
    high: float
    period: Seconds = A_DAY

    def __post_init__(self) -> None:
        _check("Diurnal arrivals", low=(0.0, self.low, self.high), high=(0.0, self.high, MOST_RATE))
        _check("Diurnal arrivals", period=(1e-3, self.period, _YEAR))

    @property
    def rate(self) -> float:
        """Mean rate in requests per second."""
        return (self.low + self.high) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Arrival times from a text file, one per line: seconds from the start of the trace, ascending.

    A relative path is relative to the deployment's folder. ``speed`` 2 replays the file in half the time.
    """

    KIND: ClassVar = "trace"
    file: str
    speed: float = 1.0

    def __post_init__(self) -> None:
        _check("A trace", speed=(1e-6, self.speed, 1e6))


Arrivals = Poisson | Gamma | Diurnal | Trace

# Datatypes of the Open Inference Protocol and the bytes of a value.
DATATYPES = {
    "BOOL": 1,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "FP16": 2,
    "BF16": 2,
    "FP32": 4,
    "FP64": 8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """An input or output tensor of a served model. ``shape`` is the shape of one sample, without the batch dim."""

    name: str
    datatype: str = "FP32"
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.name:
            raise ServingError("A tensor has an empty name, so requests cannot name it. Give it a name.")
        if self.datatype not in DATATYPES:
            raise ServingError(
                f"Tensor {self.name!r}: unknown datatype {self.datatype!r}{suggest(self.datatype, DATATYPES)}. "
                f"Give one of {', '.join(DATATYPES)}."
            )
        if any(size < 1 for size in self.shape) or self.num_bytes > LARGEST_SAMPLE:
            raise ServingError(
                f"Tensor {self.name!r}: a sample of shape {list(self.shape)} was given; expected sizes of at least "
                f"1, and at most {LARGEST_SAMPLE} bytes in all. Give the shape of one sample, without the batch."
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of one sample."""
        return math.prod(self.shape) * DATATYPES[self.datatype]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A served model: the latency of its batches, its SLO and its arrivals.

    ``slo`` is the time from a request's arrival to its deadline. ``copies`` is the number of such models; each of them
    has its own ``arrivals``.

    ``model`` names what a server runs: a zoo name, a shape file, a Hugging Face configuration, ``model.pt2`` or
    ``file.py:function``; paths are relative to the deployment's folder. ``sequence_length`` and ``image_size`` change
    its sizes. Without ``model``, a server sleeps for the latency of a batch, and ``inputs`` and ``outputs`` have to be
    given. ``latency`` may be left out if a server runs a ``model``: the server then measures it.

    A server finds ``inputs`` and ``outputs`` by running the model once. If they are given, they rename the tensors, or
    select some of the outputs. ``preprocess`` and ``postprocess`` are ``file.py:function``: the first makes the model's
    arguments from ``inputs``, which must then be given; the second transforms the model's outputs.

    ``memory`` is the number of bytes that one copy takes on a device, ``load`` the time to load its weights there.
    """

    name: str
    slo: Seconds
    latency: Latency | None = None
    arrivals: Arrivals = Poisson(rate=0.0)
    copies: int = 1
    model: str | None = None
    sequence_length: int | None = None
    image_size: int | None = None
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    preprocess: str | None = None
    postprocess: str | None = None
    memory: Bytes | None = None
    load: Seconds | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ServingError("A model has an empty name, so requests cannot name it. Give it a name.")
        _check(f"Model {self.name!r}", load=(0.0, self.load, LONGEST))
        _check(f"Model {self.name!r}", slo=(1e-6, self.slo, LONGEST), copies=(1, self.copies, MOST_MODELS))
        _check(f"Model {self.name!r}", **{name: (1, size, LARGEST_SAMPLE) for name, size in self.sizes.items()})
        if self.latency is not None and self.latency.of(1) > self.slo:
            raise ServingError(
                f"Model {self.name!r}: a batch of one takes {self.latency.of(1):g} s, longer than its SLO of "
                f"{self.slo:g} s, so that no request can meet it. Raise `slo`, or correct `latency`."
            )
        # An input and an output may have the same name, as requests and answers list them separately.
        for what, tensors in (("inputs", self.inputs), ("outputs", self.outputs)):
            if len({tensor.name for tensor in tensors}) < len(tensors):
                raise ServingError(f"Model {self.name!r} has two {what} with the same name. Give each its own.")
        if self.model is None and (self.sizes or self.preprocess or self.postprocess):
            raise ServingError(
                f"Model {self.name!r} has sequence_length, image_size, preprocess or postprocess, but no `model` for "
                "them. Add `model`, or leave them out."
            )
        if self.preprocess is not None and not self.inputs:
            raise ServingError(
                f"Model {self.name!r}: the inputs of {self.preprocess} cannot be found automatically. Give "
                "names, datatypes and shapes in `inputs`."
            )

    @property
    def sizes(self) -> dict[str, int]:
        """``sequence_length`` and ``image_size`` by name, as far as they are given."""
        given = {"sequence_length": self.sequence_length, "image_size": self.image_size}
        return {name: size for name, size in given.items() if size is not None}

    @property
    def line(self) -> Latency:
        """The latency. Raises ServingError if it is left out, so that only a server could measure it."""
        if self.latency is None:
            raise ServingError(
                f"Model {self.name!r} has no `latency`. Only a server measures it; the simulator needs it: give alpha "
                f"and beta, or measure them (meshwright measure {self.model or 'MODEL'} --batches 1..64:7log --out "
                "table.json) and give that table (--measurements table.json)."
            )
        return self.latency


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """Trouble: batches on device number ``device`` take ``factor`` times as long as the models' latencies say."""

    KIND: ClassVar = "straggler"
    device: int
    factor: float

    def __post_init__(self) -> None:
        _check("A straggler", factor=(1e-3, self.factor, 1e6))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """Trouble: device number ``device`` is missing from ``since`` to ``until`` (None: until the end).

    Requests of the batch that it was computing are queued again.
    """

    KIND: ClassVar = "outage"
    device: int
    since: Seconds
    until: Seconds | None = None

    def __post_init__(self) -> None:
        _check("An outage", since=(0.0, self.since, _YEAR), until=(0.0, self.until, _YEAR))
        if self.until is not None and self.until <= self.since:
            raise ServingError(
                f"An outage ends at {self.until:g} s and starts at {self.since:g} s; expected an end after the start."
            )


Trouble = Straggler | Outage


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Models that are served under deadlines, the devices that serve them, and the requests that arrive.

    ``devices`` is the number of devices, ``device_memory`` the bytes of each. ``policy`` is a policy's name with
    settings, or ``file.py:Class`` (`meshwright.serving.policies`). ``jitter``: every batch's time is multiplied by a
    random lognormal factor; this is the standard deviation of its logarithm. ``troubles`` lists slow or failing
    devices. Only the simulator uses ``jitter`` and ``troubles``.

    A server measures each of the following times that is 0. ``delay``: from a decision to the start of its batch on an
    idle device. ``slack``: how long before a deadline a batch has to end. ``guard``: how much earlier than necessary
    the policy's timer is set.

    The devices are numbered group by group, in the order of ``groups``. Devices outside of all groups are idle, and
    requests for models outside of all groups are not served. Groups name call c of query q as the model ``q.c``, and a
    trunk with its heads as one model.
    """

    models: tuple[ServedModel, ...] = ()
    devices: int
    policy: str = "adaptive"
    delay: Seconds = NO_TIME
    slack: Seconds = NO_TIME
    guard: Seconds = NO_TIME
    jitter: float = 0.0
    troubles: tuple[Trouble, ...] = ()
    server: Server = _SERVER
    device_memory: Bytes | None = None
    groups: tuple[Group, ...] = ()
    queries: tuple[Query, ...] = ()
    trunks: tuple[Trunk, ...] = ()
    scaling: Scaling | None = None

    SCHEMA_VERSION: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _check("A deployment", devices=(1, self.devices, MOST_DEVICES), jitter=(0.0, self.jitter, 2.0))
        _check("A deployment", **{name: (0.0, getattr(self, name), 60.0) for name in ("delay", "slack", "guard")})
        if not self.models and not self.queries and not self.trunks:
            raise ServingError(
                "The deployment has no models; expected at least one in `models`, `queries` or `trunks`."
            )
        names = [model.name for model in self.models]
        names += [f"{query.name}.{call.name}" for query in self.queries for call in query.calls]
        names += [trunk.name for trunk in self.trunks]
        again = sorted(name for name, count in Counter(names).items() if count > 1)
        if again:
            raise ServingError(f"Two models are called {again[0]!r}. Give each its own name, or use `copies`.")
        _check("A deployment", models=(0, sum(model.copies for model in self.models), MOST_MODELS))
        for trouble in self.troubles:
            if not 0 <= trouble.device < self.devices:
                raise ServingError(
                    f"`troubles` names device {trouble.device}, but the deployment has devices 0 to {self.devices - 1}."
                )
        check_groups(self, names)
        check_memory(self)
        check_scaling(self)

    def memory_of(self, models: Iterable[str]) -> float:
        """Return the bytes that ``models`` (names), with all their copies, take on a device that holds them."""
        held = set(models)
        return math.fsum((model.memory or 0.0) * model.copies for model in self.models if model.name in held)

    def has_room(self, models: Iterable[str]) -> bool:
        """Return whether ``models`` (names), with all their copies, fit into the memory of a device."""
        return self.device_memory is None or self.memory_of(models) <= self.device_memory * _ROUNDING


def read_deployment(path: Path | str) -> Deployment:
    """Read a deployment (.toml, .json). Relative paths in it (traces, models, policy) become absolute.

    Raises DocumentError with the file's name and the key that is wrong.
    """
    place = Path(path)
    try:
        deployment = decode_document(Deployment, read_data(place), str(place))
    except ServingError as error:
        raise DocumentError(f"{place}: {error}") from None
    models = tuple(_located(model, place.parent) for model in deployment.models)
    policy = deployment.policy
    if split_reference(policy) is not None:
        policy = str((place.parent / Path(policy).expanduser()).absolute())
    return replace(deployment, models=models, policy=policy)


def write_deployment(deployment: Deployment, path: Path | str) -> Path:
    """Write a deployment (.toml, .json) that `read_deployment` reads as equal. Paths are relative to its folder."""
    folder = Path(path).parent
    models = []
    for model in deployment.models:
        arrivals = model.arrivals
        if isinstance(arrivals, Trace):
            arrivals = replace(arrivals, file=os.path.relpath(arrivals.file, folder))
        models.append(
            replace(
                model,
                arrivals=arrivals,
                model=_reference_from(model.model, folder),
                preprocess=_reference_from(model.preprocess, folder),
                postprocess=_reference_from(model.postprocess, folder),
            )
        )
    policy = deployment.policy
    if split_reference(policy) is not None:
        policy = os.path.relpath(Path(policy).expanduser(), folder)
    return write_document(replace(deployment, models=tuple(models), policy=policy), path)


def _reference_from(reference: str | None, folder: Path) -> str | None:
    """The path of a referenced file, relative to a folder; a file in that folder keeps a suffix or a slash."""
    if reference is None or not Path(reference).is_absolute():
        return reference
    return f"./{os.path.relpath(reference, folder)}"


def _located(model: ServedModel, folder: Path) -> ServedModel:
    if isinstance(model.arrivals, Trace):
        trace = str((folder / Path(model.arrivals.file).expanduser()).absolute())
        model = replace(model, arrivals=replace(model.arrivals, file=trace))
    return replace(
        model,
        model=_located_reference(model.model, folder),
        preprocess=_located_reference(model.preprocess, folder),
        postprocess=_located_reference(model.postprocess, folder),
    )


def _located_reference(reference: str | None, folder: Path) -> str | None:
    """The absolute path of a referenced file; names, which have neither a slash nor a suffix, stay as they are."""
    if reference is None or not ("/" in reference or Path(reference).suffix):
        return reference
    return str((folder / Path(reference).expanduser()).absolute())
