"""Related models of a deployment: queries that call several models (`Query`), layers that models share (`Trunk`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from meshwright.spec.bounds import check_bounds
from meshwright.spec.errors import ServingError
from meshwright.spec.latency import LONGEST, Latency
from meshwright.spec.units import Bytes, Seconds

MOST_RATE = 1e9

_check = partial(check_bounds, ServingError)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """A model that a query calls. Each request of the call named ``after`` leads to ``fan_out`` requests of this call.

    ``fan_out`` is a mean and may be a fraction. The first call of a query has no ``after``. ``latency``, ``memory`` and
    ``load`` are as in `ServedModel`.
    """

    name: str
    latency: Latency
    after: str | None = None
    fan_out: float = 1.0
    memory: Bytes | None = None
    load: Seconds | None = None

    def __post_init__(self) -> None:
        _check(f"Call {self.name!r}", load=(0.0, self.load, LONGEST))
        _check(f"Call {self.name!r}", fan_out=(0.0, self.fan_out, 1e6))


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Queries that call several models; each has to be answered within ``slo`` of its arrival.

    ``rate`` is in queries per second. ``calls`` form a tree: the first is the root, and every other call is listed
    after the call that it follows.
    """

    name: str
    slo: Seconds
    rate: float
    calls: tuple[ModelCall, ...]

    def __post_init__(self) -> None:
        what = f"Query {self.name!r}"
        _check(what, slo=(1e-6, self.slo, LONGEST), rate=(0.0, self.rate, MOST_RATE), calls=(1, len(self.calls), 100))
        before, rates = list[str](), dict[str | None, float]()
        for call in self.calls:
            if call.name in before:
                raise ServingError(f"{what} has two calls {call.name!r}. Give each its own name.")
            if (call.after is None) != (not before) or (call.after is not None and call.after not in before):
                raise ServingError(
                    f"{what}: call {call.name!r} comes after {call.after!r}; expected "
                    f"{'one of the earlier calls ' + ', '.join(before) if before else 'no `after` in the first call'}."
                )
            before.append(call.name)
            rates[call.name] = rates[call.after] * call.fan_out if call.after else self.rate
            _check(f"{what}, call {call.name!r}", rate=(0.0, rates[call.name], MOST_RATE))
        if self.calls[0].fan_out != 1.0:
            raise ServingError(
                f"{what}: its first call has a fan_out, but each query calls it once. Leave fan_out out."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The layers of one model that follow its trunk: ``latency``, ``memory`` and ``load`` are those of these layers.

    ``rate`` is the number of requests per second for the model.
    """

    name: str
    latency: Latency
    rate: float
    memory: Bytes | None = None
    load: Seconds | None = None

    def __post_init__(self) -> None:
        _check(f"Head {self.name!r}", load=(0.0, self.load, LONGEST))
        _check(f"Head {self.name!r}", rate=(0.0, self.rate, MOST_RATE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trunk:
    """The first layers that several models share: they run once for a batch with requests of all these models.

    ``heads`` are the remaining layers of each model. All models have the same ``slo``. ``latency``, ``memory`` and
    ``load`` are those of the shared layers.
    """

    name: str
    slo: Seconds
    latency: Latency
    heads: tuple[Head, ...]
    memory: Bytes | None = None
    load: Seconds | None = None

    def __post_init__(self) -> None:
        what = f"Trunk {self.name!r}"
        _check(what, load=(0.0, self.load, LONGEST))
        _check(what, slo=(1e-6, self.slo, LONGEST), heads=(1, len(self.heads), 10_000))
        names = [head.name for head in self.heads]
        if len(set(names)) < len(names):
            raise ServingError(f"{what} has two heads with the same name. Give each its own.")
