"""The address and limits of a server."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from meshwright.spec.bounds import check_bounds
from meshwright.spec.errors import ServingError
from meshwright.spec.latency import LONGEST
from meshwright.spec.units import Seconds

A_MINUTE, HALF_A_MINUTE = Seconds(60.0), Seconds(30.0)
# Limits of the numbers of processes of a server: those that read requests, and those that compute.
MOST_FRONTS = MOST_WORKERS = 256
_check = partial(check_bounds, ServingError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The address and limits of a server.

    The server listens for HTTP at ``port``, for gRPC at ``grpc_port`` unless ``grpc`` is false, and for metrics at
    ``admin_port`` (always on 127.0.0.1). ``fronts`` is the number of frontend processes, which read requests.
    ``device`` is the device of workers: ``cpu``, or ``cuda`` for one GPU each.

    ``tensor_bytes`` limits the shared memory of requests in flight, per frontend and model. A request's body has at
    most ``body_bytes`` and its headers ``header_bytes``; it must arrive within ``receive`` seconds. A connection may be
    idle for ``idle`` seconds. Each frontend keeps at most ``connections`` HTTP connections open. Requests may set
    deadlines up to ``longest_deadline``. A worker that computes one batch for longer than ``stuck``, and much longer
    than expected, is killed and restarted.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    grpc: bool = True
    grpc_port: int = 8001
    admin_port: int = 8002
    fronts: int = 1
    device: str = "cpu"
    tensor_bytes: int = 2**28
    body_bytes: int = 2**26
    header_bytes: int = 2**14
    receive: Seconds = A_MINUTE
    idle: Seconds = A_MINUTE
    longest_deadline: Seconds = A_MINUTE
    stuck: Seconds = HALF_A_MINUTE
    connections: int = 16_384

    def __post_init__(self) -> None:
        what = "A server"
        if not self.host.strip():
            raise ServingError(
                "A server's host is empty; expected an address, such as 127.0.0.1; 0.0.0.0 stands for all addresses of "
                "this machine."
            )
        for name in ("port", "grpc_port", "admin_port"):
            _check(what, **{name: (0, getattr(self, name), 65_535)})
        _check(what, fronts=(1, self.fronts, MOST_FRONTS), connections=(1, self.connections, 10**6))
        _check(what, tensor_bytes=(4096, self.tensor_bytes, 2**40), body_bytes=(256, self.body_bytes, 2**32))
        _check(what, header_bytes=(256, self.header_bytes, 2**20))
        for name in ("receive", "idle", "longest_deadline", "stuck"):
            _check(what, **{name: (1e-3, getattr(self, name), LONGEST)})
        if self.device not in ("cpu", "cuda"):
            raise ServingError(f"A server's device is {self.device!r}; expected cpu or cuda.")
