"""The server under load (`Target`): its address, its models and their inputs; and its requests (`RequestStream`).

    GET  /v2/models/NAME         inputs and outputs of a model (Open Inference Protocol)
    POST /v2/repository/index    the models of the server (Triton's model repository extension)

These two requests are sent one by one before the load; nothing in this module is time-critical.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np
from numpy.typing import NDArray

from meshwright.serving.arrivals import draw_arrivals
from meshwright.serving.load.responses import TensorMetadata, printable, reason_of
from meshwright.serving.server.tokens import is_token
from meshwright.spec import Arrivals, Deployment, ServedModel, ServingError, suggest
from meshwright.spec.units import Seconds

# Each request takes about thirty bytes of memory until the end: 1.5 GB.
MOST_REQUESTS = 50_000_000
_NS = 1e9
# Arrivals are drawn for served models, which need an SLO; it does not influence them.
_ANY = Seconds(86_400.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStream:
    """The requests for a model, or for each of its copies.

    Answers later than ``deadline_s`` are late; with None, every answer is in time. Each request carries the time that
    is left until its deadline, and ``priority``. Copies of a model are separate models on a server; the copies of
    ``cat`` are called ``cat-0``, ``cat-1`` and so on.
    """

    model: str
    arrivals: Arrivals
    copies: int = 1
    deadline_s: float | None = None
    priority: int | None = None

    def __post_init__(self) -> None:
        if self.deadline_s is not None and not 1e-6 <= self.deadline_s <= _ANY:
            raise ServingError(
                f"Model {self.model!r}: the deadline is {self.deadline_s:g} s; expected 1 us to {_ANY:g} s."
            )

    @property
    def parameters(self) -> dict[str, int]:
        """Parameters that each request carries: ``timeout`` (us) and ``priority``, if they are given."""
        said = {} if self.deadline_s is None else {"timeout": max(round(self.deadline_s * 1e6), 1)}
        return said if self.priority is None else {**said, "priority": self.priority}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model, or of its copies, on the server."""
        if self.copies == 1:
            return (self.model,)
        return tuple(f"{self.model}-{copy}" for copy in range(self.copies))


def deployment_streams(deployment: Deployment, deadline_s: float | None = None) -> tuple[RequestStream, ...]:
    """Return a stream for each model of a deployment; its deadline is ``deadline_s``, or the model's SLO if None."""
    return tuple(
        RequestStream(
            model=model.name,
            arrivals=model.arrivals,
            copies=model.copies,
            deadline_s=float(model.slo) if deadline_s is None else deadline_s,
        )
        for model in deployment.models
    )


# Moments are those of `meshwright.serving.arrivals`: with the same models, seconds and seed, a server gets requests at
# the moments of the simulator's.
def draw_moments(
    streams: Sequence[RequestStream], seconds: float, *, seed: int, scale: float, ramp_s: float
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return the moment (ns, ascending) and the model index of each request; each copy has its own index.

    During a ramp before the ``seconds``, a request at a moment t is kept with probability t / ``ramp_s``. Raises
    ServingError for too many requests.
    """
    models = [
        ServedModel(name=stream.model, slo=_ANY, arrivals=stream.arrivals, copies=stream.copies) for stream in streams
    ]
    moments, whose = draw_arrivals(models, ramp_s + seconds, seed=seed, scale=scale)
    if ramp_s:
        chance = np.random.default_rng([seed, 2**30]).random(len(moments))
        kept = chance * ramp_s * _NS <= moments
        moments, whose = moments[kept], whose[kept]
    if len(moments) > MOST_REQUESTS:
        raise ServingError(
            f"{len(moments):,} requests come in {ramp_s + seconds:g} s; at most {MOST_REQUESTS:,} are sent in one run. "
            "Ask for fewer seconds."
        )
    return moments, whose


def most_at_once(moments: NDArray[np.int64], seconds: float) -> int:
    """Return the largest number of requests that are due within any span of ``seconds``."""
    if not len(moments):
        return 0
    ends = np.searchsorted(moments, moments + int(seconds * _NS), side="right")
    return int((ends - np.arange(len(moments))).max())


# How long the server may take to answer these requests; one that compiles may be slow.
_PATIENCE_S = 10.0
_MOST_BYTES = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server's address; ``path`` precedes ``/v2`` in URLs. ``token`` is sent as a bearer token, if given."""

    host: str
    port: int
    path: str = ""
    token: str | None = field(default=None, repr=False)

    @property
    def authority(self) -> str:
        """Host and port in the form of a Host header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        bearer = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        return {"Host": self.authority, **bearer}

    def model_path(self, model: str) -> str:
        """Return the path of a model in URLs."""
        return f"{self.path}/v2/models/{quote(model, safe='')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSignature:
    """Inputs and outputs of a model; -1 in a shape is an open size, the first of which is the batch."""

    name: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


def read_target(url: str, token: str | None = None) -> Target:
    """Parse the URL of a server. Raises ServingError if it is not a valid address."""
    expected = "expected for example http://127.0.0.1:8000. Check the address."
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ServingError(f"{url!r} is not the address of a server ({error}); {expected}") from None
    if parts.scheme != "http" or not host or parts.query or parts.fragment or parts.username:
        raise ServingError(f"{url!r} is not the address of a server without TLS; {expected}")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ServingError(f"{url!r} has characters that an address cannot have; {expected}")
    if token is not None and not is_token(token):
        raise ServingError(
            "The token has characters that an HTTP header cannot have; expected one line of ASCII without spaces."
        )
    return Target(host=host, port=80 if port is None else port, path=parts.path.rstrip("/"), token=token)


def find_address(target: Target) -> tuple[int, tuple[Any, ...]]:
    """Return the server's socket family and address, found by connecting once. Raises ServingError if that fails."""
    problem: OSError | None = None
    try:
        found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise _unreachable(target, error) from None
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as trial:
                trial.settimeout(_PATIENCE_S)
                trial.connect(address)
            return int(family), address
        except OSError as error:
            problem = error
    raise _unreachable(target, problem or OSError("no address"))


def read_model(target: Target, name: str) -> ModelSignature:
    """Read a model's metadata. Raises ServingError if the server has no such model, or does not answer."""
    status, content = _ask(target, "GET", target.model_path(name))
    if status != 200:
        known: list[str] = []
        with contextlib.suppress(ServingError):
            known = [model for model in read_model_names(target) if model != name]
        raise ServingError(
            f"The server at {target.authority} answered {status} when asked for model {name!r}{suggest(name, known)}: "
            f"{reason_of(content)}. Check the name, and whether the server has loaded it."
        )
    try:
        data = json.loads(content)
        return ModelSignature(
            name=name,
            inputs=tuple(map(_tensor, data["inputs"])),
            outputs=tuple(map(_tensor, data.get("outputs", ()))),
        )
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ServingError(
            f"The server at {target.authority} returned for model {name!r} something other than metadata of the Open "
            f"Inference Protocol ({type(error).__name__}: {error}). Check the address."
        ) from None


def read_model_names(target: Target) -> list[str]:
    """Return the names of the server's models. Raises ServingError if it does not list them."""
    status, content = _ask(target, "POST", f"{target.path}/v2/repository/index", b"{}")
    try:
        if status == 200:
            return sorted({str(item["name"]) for item in json.loads(content)})
    except (KeyError, TypeError, ValueError, RecursionError):
        status = 0
    raise ServingError(
        f"The server at {target.authority} does not list its models"
        f"{f' (status {status} for /v2/repository/index)' if status else ''}. Give --model NAME."
    )


def only_model(target: Target) -> str:
    """Return the name of the server's only model. Raises ServingError if it has none, or more than one."""
    names = read_model_names(target)
    if len(names) != 1:
        raise ServingError(
            f"The server at {target.authority} has {len(names)} models"
            f"{suggest('', names)}. Give --model NAME for one of them, or --deployment FILE for all."
        )
    return names[0]


def _tensor(data: Any) -> TensorMetadata:
    shape = tuple(data["shape"])
    if not all(isinstance(size, int) and not isinstance(size, bool) and size >= -1 for size in shape):
        raise ValueError(f"shape {shape!r}")
    if not isinstance(data["name"], str) or not isinstance(data["datatype"], str):
        raise TypeError("name and datatype are strings")
    return TensorMetadata(name=data["name"], datatype=data["datatype"], shape=shape)


def _ask(target: Target, method: str, path: str, sent: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(target.host, target.port, timeout=_PATIENCE_S)
    try:
        connection.request(method, path, sent, {**target.headers, "Content-Type": "application/json"})
        response = connection.getresponse()
        status, content = response.status, response.read(_MOST_BYTES)
    except OSError as error:
        raise _unreachable(target, error) from None
    except http.client.HTTPException as error:
        said = printable(str(error)) or "nothing readable"
        raise ServingError(
            f"The server at {target.authority} does not speak HTTP/1.1 ({type(error).__name__}: {said}). Give the "
            "address at which it answers HTTP; gRPC has a separate port."
        ) from None
    finally:
        connection.close()
    if status == 401:
        given = "no token" if target.token is None else "an invalid token"
        raise ServingError(
            f"The server at {target.authority} requires a token and got {given}. Give a file that contains it: "
            "--token-file FILE."
        )
    return status, content


def _unreachable(target: Target, error: Exception) -> ServingError:
    why = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return ServingError(
        f"No server answers at {target.authority} ({why}). Start one there, or check host and port of the address."
    )
