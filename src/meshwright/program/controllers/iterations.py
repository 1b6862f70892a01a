"""One iteration of a worker: parameters come, a microbatch is computed, the gradient leaves.

Workers are ranks 0 to n - 1 and hold stage `WORKER`; a server is rank n and holds stage `SERVER`. Iteration c of worker
w computes microbatch c n + w, so that a message says whose it is.
"""

from __future__ import annotations

from typing import Any

from meshwright.spec.control import Issue
from meshwright.spec.errors import ProgramError
from meshwright.spec.instructions import Backward, Forward, Receive, Send

WORKER, SERVER = 0, 1


def computation(
    rank: int, microbatch: int, version: int, *, waits: tuple[int, ...], watched: bool, abandonable: bool = False
) -> list[Issue]:
    """Forward and backward of one microbatch; ``watched`` is the end of the backward."""
    facts = {"stage": WORKER, "microbatch": microbatch, "version": version}
    forward, backward = Forward(**facts), Backward(**facts)
    return [
        Issue(rank=rank, stream="compute", instruction=forward, waits=waits, abandonable=abandonable),
        Issue(rank=rank, stream="compute", instruction=backward, watched=watched, abandonable=abandonable),
    ]


def pull(server: int, rank: int, microbatch: int, num_bytes: int) -> list[Issue]:
    """The server sends its parameters, the worker receives them."""
    facts = {"microbatch": microbatch, "num_bytes": num_bytes}
    send = Send(stage=SERVER, peer=WORKER, payload="activation", **facts)
    receive = Receive(stage=WORKER, peer=SERVER, payload="activation", **facts)
    group = server, rank
    return [
        Issue(rank=server, stream="send", instruction=send, group=group),
        Issue(rank=rank, stream="receive", instruction=receive, group=group),
    ]


def push(server: int, rank: int, microbatch: int, num_bytes: int, *, backward: int) -> Issue:
    """The worker sends its gradient after its backward; the controller is told when it has arrived."""
    send = Send(stage=WORKER, peer=SERVER, microbatch=microbatch, payload="gradient", num_bytes=num_bytes)
    return Issue(rank=rank, stream="send", instruction=send, group=(rank, server), waits=(backward,), watched=True)


def arrival(server: int, rank: int, send: Send) -> Issue:
    """The receive of a gradient; issued on arrival, since the receives of a rank end in the order of issue."""
    receive = Receive(
        stage=SERVER, peer=WORKER, microbatch=send.microbatch, payload="gradient", num_bytes=send.num_bytes
    )
    return Issue(rank=server, stream="receive", instruction=receive, group=(rank, server))


def iteration(
    server: int, rank: int, microbatch: int, version: int, num_bytes: int, *, first: int, pulls: bool
) -> list[Issue]:
    """All of an iteration with a server; ``first`` is the handle of the first instruction, the push is the last."""
    issues = pull(server, rank, microbatch, num_bytes) if pulls else []
    received = (first + len(issues) - 1,) if pulls else ()
    issues += computation(rank, microbatch, version, waits=received, watched=False)
    issues.append(push(server, rank, microbatch, num_bytes, backward=first + len(issues) - 1))
    return issues


def check_counts(**bounds_of: tuple[int, Any, int | None]) -> None:
    """Raise ProgramError unless each value is whole and between its bounds: name = (least, value, most or None)."""
    for name, (least, value, most) in bounds_of.items():
        if not isinstance(value, int) or value < least or (most is not None and value > most):
            expected = f"{least} or more" if most is None else f"{least} to {most}"
            raise ProgramError(f"{name} is {value!r}; expected a whole number, {expected}.")
