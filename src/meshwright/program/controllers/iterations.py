"""One iteration of a worker: pull parameters, compute a microbatch, push the gradient.

Workers are ranks 0 to n - 1 and hold stage `WORKER`; servers are ranks n and up and hold stages from `SERVER` on.
Iteration c of worker w computes microbatch c n + w, so that a message identifies its worker and iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.spec import Backward, Forward, ProgramError, Receive, RunError, Send
from meshwright.spec.control import Issue

WORKER, SERVER = 0, 1


def computation(
    rank: int, microbatch: int, version: int, *, waits: tuple[int, ...], watched: bool, abandonable: bool = False
) -> list[Issue]:
    """Return the issues of the forward and the backward of one microbatch on worker ``rank``.

    The forward waits for the handles in ``waits``. If ``watched``, the controller receives an event when the backward
    ends. If ``abandonable``, a later decision may abandon both.
    """
    facts = {"stage": WORKER, "microbatch": microbatch, "version": version}
    forward, backward = Forward(**facts), Backward(**facts)
    return [
        Issue(rank=rank, stream="compute", instruction=forward, waits=waits, abandonable=abandonable),
        Issue(rank=rank, stream="compute", instruction=backward, watched=watched, abandonable=abandonable),
    ]


def pull(server: int, place: int, rank: int, microbatch: int, num_bytes: int) -> list[Issue]:
    """Return the issues by which worker ``rank`` gets parameters: the server's send and the worker's receive.

    ``server`` is the server's rank, ``place`` its number among the servers, from 0.
    """
    facts = {"microbatch": microbatch, "num_bytes": num_bytes}
    send = Send(stage=SERVER + place, peer=WORKER, payload="activation", **facts)
    receive = Receive(stage=WORKER, peer=SERVER + place, payload="activation", **facts)
    group = server, rank
    return [
        Issue(rank=server, stream="send", instruction=send, group=group),
        Issue(rank=rank, stream="receive", instruction=receive, group=group),
    ]


def push(server: int, place: int, rank: int, microbatch: int, num_bytes: int, *, backward: int) -> Issue:
    """Return the send of a gradient from worker ``rank`` to a server, after the instruction ``backward`` (a handle).

    ``server`` is the server's rank, ``place`` its number among the servers, from 0. The controller receives an event
    when the send ends.
    """
    send = Send(stage=WORKER, peer=SERVER + place, microbatch=microbatch, payload="gradient", num_bytes=num_bytes)
    return Issue(rank=rank, stream="send", instruction=send, group=(rank, server), waits=(backward,), watched=True)


def arrival(server: int, rank: int, send: Send) -> Issue:
    """Return the receive that matches ``send``, on the rank ``server``.

    Issue it when the gradient has arrived: the receives of a rank end in order of issue, so a receive that is issued
    earlier would delay those of faster workers.
    """
    receive = Receive(
        stage=send.peer, peer=WORKER, microbatch=send.microbatch, payload="gradient", num_bytes=send.num_bytes
    )
    return Issue(rank=server, stream="receive", instruction=receive, group=(rank, server))


def iteration(
    servers: Sequence[int], rank: int, microbatch: int, version: int, num_bytes: int, *, first: int, pulls: bool
) -> list[Issue]:
    """Return the issues of one iteration of worker ``rank``: pulls, forward, backward, and one push to each server.

    ``servers`` are ranks; each holds an equal part of the ``num_bytes`` of parameters. ``first`` is the handle of the
    first returned instruction. Without ``pulls`` the worker computes on the parameters that it has. The pushes come
    last, in the order of ``servers``.
    """
    share, rest = divmod(num_bytes, len(servers))
    parts = [(server, place, share + (place < rest)) for place, server in enumerate(servers)]
    issues, received = list[Issue](), list[int]()
    for server, place, size in parts if pulls else ():
        issues += pull(server, place, rank, microbatch, size)
        received.append(first + len(issues) - 1)
    issues += computation(rank, microbatch, version, waits=tuple(received), watched=False)
    backward = first + len(issues) - 1
    return issues + [push(server, place, rank, microbatch, size, backward=backward) for server, place, size in parts]


def with_dead(dead: tuple[int, ...], rank: int, num_workers: int) -> tuple[int, ...]:
    """Return the workers that died, with ``rank``. Raises RunError if it was a server or the last worker."""
    is_last = len(dead) + 1 == num_workers
    if rank >= num_workers or is_last:
        what = "It was the last worker" if rank < num_workers else "It had the parameters"
        raise RunError(
            f"Rank {rank} of the controlled run has died. {what}, so the others cannot go on. Start the run again from "
            "saved parameters."
        )
    return *dead, rank


def check_counts(**bounds_of: tuple[int, Any, int | None]) -> None:
    """Raise ProgramError unless each value is a whole number between its bounds (inclusive).

    Each argument is ``name=(least, value, most)``; ``most`` is None if there is no upper bound.
    """
    for name, (least, value, most) in bounds_of.items():
        if not isinstance(value, int) or value < least or (most is not None and value > most):
            expected = f"{least} or more" if most is None else f"{least} to {most}"
            raise ProgramError(f"{name} is {value!r}; expected a whole number, {expected}.")
