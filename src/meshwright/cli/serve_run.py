"""``meshwright serve DEPLOYMENT``: a server of models under deadlines, until it is stopped."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.output import note
from meshwright.spec.deployment import Deployment, read_deployment
from meshwright.spec.server import MOST_FRONTS, MOST_WORKERS
from meshwright.spec.units import format_count

if TYPE_CHECKING:
    from meshwright.serving.server.supervisor import Supervisor


def run(
    deployment: Annotated[Path, typer.Argument(metavar="DEPLOYMENT", help="Models and devices (.toml or .json).")],
    policy: Annotated[
        str | None, typer.Option(help="Which policy decides: a name with settings, or your own, file.py:Class.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="The address to listen at; 0.0.0.0 means all addresses of this machine.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="The port of requests; 0 for a free one.", min=0, max=65_535)] = None,
    grpc_port: Annotated[
        int | None, typer.Option(help="The port of requests over gRPC; 0 for a free one.", min=0, max=65_535)
    ] = None,
    grpc: Annotated[bool | None, typer.Option(help="Whether to serve gRPC as well.", show_default=False)] = None,
    admin_port: Annotated[
        int | None, typer.Option(help="The port of metrics, on this machine only; 0 for a free one.", min=0, max=65_535)
    ] = None,
    fronts: Annotated[int | None, typer.Option(help="Processes that read requests.", min=1, max=MOST_FRONTS)] = None,
    devices: Annotated[int | None, typer.Option(help="Workers, one process each.", min=1, max=MOST_WORKERS)] = None,
    token_file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Requests must carry the token in this file.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help="Write all events and decisions to this file, for `serve replay`.")
    ] = None,
) -> None:
    """Serve models over HTTP and gRPC (Open Inference Protocol v2), each request by its deadline.

    Ctrl-C stops the server in order.
    """
    from meshwright.serving.policies.named import load_policy

    given = read_deployment(deployment)
    asked: dict[str, Any] = {"host": host, "port": port, "grpc": grpc, "grpc_port": grpc_port}
    asked |= {"admin_port": admin_port, "fronts": fronts}
    chosen = replace(
        given,
        policy=policy or given.policy,
        devices=devices or given.devices,
        server=replace(given.server, **{name: value for name, value in asked.items() if value is not None}),
    )
    load_policy(chosen.policy)
    asyncio.run(_serve(chosen, deployment, log, token_file))


async def _serve(deployment: Deployment, file: Path, log: Path | None, token_file: Path | None) -> None:
    from meshwright.serving.server.admin import serve_admin
    from meshwright.serving.server.supervisor import Supervisor

    supervisor = Supervisor(deployment, log=log, token_file=token_file, told=_tell)
    loop = asyncio.get_running_loop()
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            loop.add_signal_handler(getattr(signal, name), supervisor.stop)
    parts = (supervisor.run(), serve_admin(supervisor, file, token_file), _welcome(supervisor))
    tasks = [asyncio.create_task(each) for each in parts]
    try:
        # The first failure is reported.
        await asyncio.gather(*tasks)
    finally:
        if any(not task.done() for task in tasks):
            supervisor.stop()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _welcome(supervisor: Supervisor) -> None:
    await supervisor.wait_until_ready()
    if not supervisor.is_ready:
        return
    deployment, server = supervisor.deployment, supervisor.deployment.server
    models = format_count(sum(model.copies for model in deployment.models), "model")
    host = f"[{server.host}]" if ":" in server.host else server.host
    over_grpc = f" and grpc://{host}:{supervisor.grpc_port}" if server.grpc else ""
    note(
        f"Ready: {models} on {format_count(deployment.devices, 'device')} by policy {deployment.policy}, at "
        f"http://{host}:{supervisor.port}/v2{over_grpc}; metrics at "
        f"http://127.0.0.1:{supervisor.admin_port}/metrics. "
        "Ctrl-C ends it."
    )


def _tell(name: str, facts: dict[str, Any]) -> None:
    """The message for an event that a user should know at once; loading is reported for the first worker only."""
    match facts["kind"]:
        case "ended" if facts["again"] and (facts["code"] or not facts["is_released"]):
            why = "" if facts["error"] is None else f" ({facts['error']})"
            note(f"{name} ended with {_meaning(facts['code'])}{why}; it is started again.")
        case "broken":
            note(f"worker-{facts['worker']} lacks a model, and is started again: {facts['text']}")
        case "loading" if facts["device"] == 0:
            note(f"Loading {facts['model']} ({facts['place'] + 1} of {facts['of']}).")
        case "warming" if facts["device"] == 0:
            note("Warming up; latencies that the deployment does not state are measured.")
        case "preparing":
            note(f"Preparing the policy {facts['policy']}; the first time it is compiled, in some seconds.")
        case "hire":
            note(f"worker-{facts['device']} is started, because the load grows.")
        case "release":
            note(f"worker-{facts['device']} is handed back, because the load falls.")
        case "failure":
            note(f"{facts['model']} failed on a sample: {facts['text']}")
        case "limited" if name == "front-0":
            note(
                f"The system lets a front have {facts['files']} files open; connections may need {facts['wanted']}. "
                f"There can be {facts['connections']} connections. Raise the limit (ulimit -Hn), or give fewer "
                f"connections in [server]."
            )
        case "unlogged" | "unstarted":
            note(facts["text"])
        case "stuck":
            note(f"worker-{facts['worker']} has computed one batch for {facts['seconds']:.3g} s; it is killed.")
        case _:
            pass


def _meaning(code: int) -> str:
    """An exit code, or the signal that killed the process."""
    try:
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def replay(
    log: Annotated[Path, typer.Argument(metavar="LOG", exists=True, dir_okay=False, help="What `serve --log` wrote.")],
) -> None:
    """Repeat all decisions of a server: feed the events of its log through its policy, and compare."""
    from meshwright.serving.server.replay import replay_log

    events, decisions = replay_log(log)
    print(f"{events} events, {decisions} decisions: all equal.")
