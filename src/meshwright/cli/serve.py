"""``meshwright serve``: serve models under deadlines, until stopped.

``serve models`` lists a server's models, and loads and unloads models. ``serve load`` sends requests to a server and
measures its answers. ``serve timeline URL`` records what happens to each request of a server for some seconds, for
Perfetto. ``serve replay`` repeats the decisions of a log.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import http.client
import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote, urlsplit

import typer
from rich.text import Text
from typer.core import TyperGroup

from meshwright.cli.json_output import name_schema, print_json
from meshwright.cli.model_arguments import JsonOption
from meshwright.cli.output import note, print_tables, terminal_sink
from meshwright.spec import (
    Arrivals,
    Deployment,
    DocumentError,
    Gamma,
    Poisson,
    ServingError,
    Trace,
    format_count,
    format_percent,
    format_seconds,
    read_deployment,
    write_text,
)
from meshwright.spec.codec import dump_json
from meshwright.spec.files import refuse_replacing, write_bytes
from meshwright.spec.server import MOST_FRONTS, MOST_WORKERS
from meshwright.spec.units import Seconds

if TYPE_CHECKING:
    from meshwright.serving.load import LoadResult, RequestStream
    from meshwright.serving.server.supervisor import Supervisor


def run(
    deployment: Annotated[Path, typer.Argument(metavar="DEPLOYMENT", help="Models and devices (.toml or .json).")],
    policy: Annotated[
        str | None,
        typer.Option(help="The policy that forms batches: a name with settings, or your own, file.py:Class."),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="The address to listen at; 0.0.0.0 means all addresses of this machine.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="The port for requests over HTTP; 0 for a free one.", min=0, max=65_535)
    ] = None,
    grpc_port: Annotated[
        int | None, typer.Option(help="The port for requests over gRPC; 0 for a free one.", min=0, max=65_535)
    ] = None,
    grpc: Annotated[bool | None, typer.Option(help="Whether to serve gRPC as well.", show_default=False)] = None,
    admin_port: Annotated[
        int | None,
        typer.Option(
            help="The port for metrics and `serve models`, on this machine only; 0 for a free one.", min=0, max=65_535
        ),
    ] = None,
    fronts: Annotated[
        int | None, typer.Option(help="Number of frontends, the processes that read requests.", min=1, max=MOST_FRONTS)
    ] = None,
    devices: Annotated[
        int | None, typer.Option(help="Number of devices, each with one worker process.", min=1, max=MOST_WORKERS)
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Requests must carry the token in this file.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help="Write all events and decisions to this file, for `serve replay`.")
    ] = None,
) -> None:
    """Serve models over HTTP and gRPC (Open Inference Protocol v2), each request by its deadline.

    Ctrl-C stops the server: it answers the requests that it has, and accepts no further ones.
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
                f"The system lets a frontend have {facts['files']} files open, but its connections may need "
                f"{facts['wanted']}; only {facts['connections']} connections are possible. Raise the limit (ulimit "
                f"-Hn), or give fewer connections in [server] of the deployment."
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
    log: Annotated[
        Path, typer.Argument(metavar="LOG", exists=True, dir_okay=False, help="The log that `serve --log` wrote.")
    ],
) -> None:
    """Repeat all decisions of a server: feed the events of its log through its policy, and compare."""
    from meshwright.serving.server.replay import replay_log

    events, decisions = replay_log(log)
    print(f"{events} events, {decisions} decisions: all equal.")


# Large models take their time to load.
_LIMIT_S = 3600.0
_MOST_BYTES = 2**24


def models(
    url: Annotated[str, typer.Argument(metavar="ADMIN-URL", help="The server's admin address: http://127.0.0.1:8002.")],
    load: Annotated[
        list[str] | None,
        typer.Option(help="Load a model as it is in the deployment's file now. May be given several times."),
    ] = None,
    unload: Annotated[
        list[str] | None,
        typer.Option(help="Unload a model after its queued requests are answered. May be given several times."),
    ] = None,
    update: Annotated[
        bool, typer.Option("--update", help="Serve exactly the models that the deployment's file has now.")
    ] = False,
    token_file: Annotated[Path | None, typer.Option(help="A file with the token that the server requires.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the models of a server, or have it load and unload some while it answers requests.

    A model that is loaded again is served by its former version until the new one is ready. A load that fails changes
    nothing.
    """
    from meshwright.report import make_table

    paths = ["update"] if update else []
    paths += [f"models/{quote(name, safe='')}/load" for name in load or []]
    paths += [f"models/{quote(name, safe='')}/unload" for name in unload or []]
    for path in paths or ["index"]:
        rows = _post(url, path, token_file)
    if as_json:
        print_json("served-models", {"models": rows})
    else:
        print_tables(make_table(rows))


def _post(url: str, path: str, token_file: Path | None) -> Any:
    """The answer of a server's admin port. Raises ServingError for a bad address or a missing or refusing server."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if parts.scheme != "http" or host is None or port is None:
        raise ServingError(f"{url!r} is not an admin address; expected one such as http://127.0.0.1:8002.")
    headers = {}
    if token_file is not None:
        from meshwright.serving.server.tokens import read_token

        headers["Authorization"] = f"Bearer {read_token(token_file)}"
    connection = http.client.HTTPConnection(host, port, timeout=_LIMIT_S)
    try:
        connection.request("POST", f"/v2/repository/{path}", headers=headers)
        answer = connection.getresponse()
        document = json.loads(answer.read(_MOST_BYTES))
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise ServingError(
            f"No server's admin port answers at {url}: {why}. `meshwright serve` prints the address of this port."
        ) from None
    finally:
        connection.close()
    if answer.status != 200:
        said = document.get("error", document) if isinstance(document, dict) else document
        raise ServingError(f"The server answered {answer.status}: {said}")
    return document


# The most seconds that the server needs in addition to the recording itself.
_PATIENCE_S = 60.0
# As for other traces: a higher level takes longer and saves little.
_LEVEL = 3


def timeline(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server's admin port: http://127.0.0.1:8002.")],
    seconds: Annotated[float, typer.Option(help="Seconds to record.", min=0.1, max=30.0)] = 2.0,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The file to write (.json, or .json.gz), for ui.perfetto.dev.")
    ] = Path("timeline.json"),
) -> None:
    """Record what happens to each request from now on, and write it as a trace for https://ui.perfetto.dev."""
    if not out.name.endswith((".json", ".json.gz")):
        raise DocumentError(f"--out {out}: traces are JSON. Choose a name that ends in .json, or .json.gz.")
    refuse_replacing(out)
    status, content = _ask(url, seconds)
    try:
        document: dict[str, Any] = json.loads(content)
        if status in (400, 403, 409, 503):
            raise ServingError(f"The server at {url} answered {status}: {document['error']}")
        told = document["otherData"]
        requests, batches = format_count(told["requests"], "request"), f"{told['batches']:,}"
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ServingError(
            f"The answer of {url} (status {status}) is not a timeline; expected the address of a server's admin port, "
            "which `meshwright serve` prints when it is ready."
        ) from None
    write_bytes(gzip.compress(content, _LEVEL, mtime=0) if out.suffix == ".gz" else content, out)
    print(f"{requests} and {batches} batches in {format_seconds(told['seconds'])}, written to {out}.")
    print("Open it at https://ui.perfetto.dev.")
    for kind, words in (("cut", "had more events than were kept"), ("missing", "did not answer")):
        if told[kind]:
            note(f"{', '.join(told[kind])} {words}.")


def _ask(url: str, seconds: float) -> tuple[int, bytes]:
    from meshwright.serving.load import read_target

    target = read_target(url)
    connection = http.client.HTTPConnection(target.host, target.port, timeout=seconds + _PATIENCE_S)
    with contextlib.closing(connection):
        try:
            connection.request("GET", f"{target.path}/timeline?seconds={seconds:.6f}")
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServingError(
                f"Nothing answers at {target.authority} ({str(error) or type(error).__name__}). Start the server, or "
                "give the address of its admin port."
            ) from None


class _DeploymentFirst(TyperGroup):
    """``serve DEPLOYMENT`` is ``serve run DEPLOYMENT``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["run", *args]
        return super().parse_args(ctx, args)


serve = typer.Typer(
    name="serve",
    cls=_DeploymentFirst,
    help="Serve models under deadlines: `meshwright serve DEPLOYMENT`; options: `serve run -h`.",
    no_args_is_help=True,
)
serve.command()(run)
serve.command()(models)
serve.command()(replay)
serve.command()(timeline)

_SHOWN = ("model", "requests_per_s", "goodput_per_s", "in_time_share", "p50_s", "p99_s", "max_s")
_TOLD = {
    "num_in_time": "in time",
    "num_late": "late",
    "num_failed": "without a connection",
    "num_malformed": "malformed",
    "num_wrong": "wrong",
    "num_unanswered": "unanswered",
    "num_unsent": "unsent",
}


@serve.command()
def load(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server's address: http://127.0.0.1:8000.")],
    model: Annotated[
        str | None, typer.Option(help="The model to send requests to; by default the server's only one.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second.", min=0.0, max=1e9)] = None,
    shape: Annotated[
        float | None,
        typer.Option(
            help="With --rate: shape of the gamma distribution of gaps between requests; 1: Poisson, 0.1: bursts.",
            min=1e-3,
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Arrival times from a file instead of --rate: one per line, in seconds.")
    ] = None,
    deployment: Annotated[
        Path | None,
        typer.Option(
            help="Take models, arrivals and deadlines from this deployment (.toml); copies of a model cat are called "
            "cat-0, cat-1, ..."
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Seconds of requests.", min=0.001, max=1e6)] = 10.0,
    scale: Annotated[float, typer.Option(help="Multiply all rates by this.", min=0.0, max=1e6)] = 1.0,
    ramp: Annotated[
        float,
        typer.Option(
            help="Seconds of warm-up in which rates grow from 0; their requests do not count.", min=0.0, max=1e6
        ),
    ] = 0.0,
    deadline: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help='The deadline of each answer ("50 ms"): sent with the request and used for the counts.'
        ),
    ] = None,
    priority: Annotated[
        int | None,
        typer.Option(
            help="Priority sent with each request: 1 for the most important, 7 for the least.", min=0, max=2**64 - 1
        ),
    ] = None,
    rows: Annotated[int, typer.Option(help="Samples in a request.", min=1, max=65_536)] = 1,
    binary: Annotated[bool, typer.Option("--binary", help="Send values in Triton's binary format, not JSON.")] = False,
    connections: Annotated[
        int, typer.Option(help="The most connections that are open at a time.", min=1, max=50_000)
    ] = 2048,
    processes: Annotated[int, typer.Option(help="Processes that send requests.", min=1, max=64)] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the arrival times and values.", min=0, max=2**31)] = 0,
    token_file: Annotated[Path | None, typer.Option(help="A file with the token that the server requires.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write all figures to this file (.json).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Send requests at their arrival times (open loop), and print how many are answered in time, and the latencies.

    Arrival times are drawn beforehand, as `simulate` draws them, and latency counts from them. Exit code 1 if no
    answer had status 200, or if an answer was wrong.
    """
    from meshwright.serving.load import run_load
    from meshwright.serving.server.tokens import read_token

    if out is not None:
        if out.suffix != ".json":
            raise DocumentError(f"--out {out}: results are written as JSON. Choose a name that ends in .json.")
        refuse_replacing(out)
    token = None if token_file is None else read_token(token_file)
    deadline_s = None if deadline is None else _read_time(deadline)
    if deployment is not None:
        _refuse_beside("--deployment", {"--model": model, "--rate": rate, "--shape": shape, "--trace": trace})
        streams = _deployed(deployment, deadline_s)
    else:
        streams = _one_stream(url, token, model, _arrivals(rate, shape, trace), deadline_s)
    with terminal_sink(as_json) as sink:
        result = run_load(
            url,
            [replace(stream, priority=priority) for stream in streams],
            seconds,
            seed=seed,
            scale=scale,
            ramp_s=ramp,
            rows=rows,
            binary=binary,
            connections=connections,
            processes=processes,
            token=token,
            events=sink,
        )
    document = {**result.row(), "warnings": result.warnings(), "models": result.rows(), "series": list(result.series)}
    if out is not None:
        write_text(dump_json(name_schema("load", document)), out)
    if as_json:
        print_json("load", document)
    else:
        _print(result, document, out)
    if result.total.statuses.get(200, 0) == 0 or result.num_wrong:
        raise typer.Exit(1)


def _read_time(text: str) -> float:
    try:
        return float(Seconds.decode_scalar(text))
    except ValueError as error:
        raise typer.BadParameter(f"--deadline: {error}.") from None


def _refuse_beside(option: str, others: dict[str, Any]) -> None:
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise DocumentError(f"{option} and {given[0]} both set what arrives at the server. Give one of them.")


def _arrivals(rate: float | None, shape: float | None, trace: Path | None) -> Arrivals:
    if trace is not None:
        _refuse_beside("--trace", {"--rate": rate, "--shape": shape})
        return Trace(file=str(trace))
    if rate is None:
        raise DocumentError("No arrivals were given. Give --rate N, --trace FILE or --deployment FILE.")
    return Poisson(rate=rate) if shape is None else Gamma(rate=rate, shape=shape)


def _deployed(path: Path, deadline_s: float | None) -> tuple[RequestStream, ...]:
    from meshwright.serving.load import deployment_streams

    return deployment_streams(read_deployment(path), deadline_s)


def _one_stream(
    url: str, token: str | None, model: str | None, arrivals: Arrivals, deadline_s: float | None
) -> tuple[RequestStream, ...]:
    from meshwright.serving.load import RequestStream, only_model, read_target

    name = only_model(read_target(url, token)) if model is None else model
    return (RequestStream(model=name, arrivals=arrivals, deadline_s=deadline_s),)


def _print(result: LoadResult, document: dict[str, Any], out: Path | None) -> None:
    from meshwright.report import make_table

    models = [{name: row[name] for name in _SHOWN} for row in document["models"]]
    total = {name: document[name] for name in _SHOWN}
    share = "" if total["in_time_share"] is None else f" ({format_percent(total['in_time_share'], 2)})"
    statuses = [f"{count:,} with status {status}" for status, count in result.total.statuses.items() if status != 200]
    counts = [f"{document[name]:,} {words}" for name, words in _TOLD.items() if document[name] or name == "num_in_time"]
    lines = [
        f"{total['goodput_per_s']:.4g} of {total['requests_per_s']:.4g} requests per second answered in time{share}.",
        make_table(models, total=total if len(models) > 1 else None),
        f"{result.total.num_requests:,} requests in {format_seconds(result.seconds)}: {', '.join(counts + statuses)}.",
    ]
    lines += [f"One answer with status {status}: {reason}." for status, reason in result.reasons.items()]
    if result.total.rejected_p99_s is not None:
        lines.append(
            f"99 % of the requests with status 503 were answered within {format_seconds(result.total.rejected_p99_s)}."
        )
    if document["lateness_p99_s"] is not None:
        lines.append(
            f"The sender was {format_seconds(document['lateness_p50_s'])} late in the median, "
            f"{format_seconds(document['lateness_p99_s'])} at the 99th percentile and "
            f"{format_seconds(document['lateness_max_s'])} at most, and computed "
            f"{format_seconds(document['cpu_s_per_request'])} per request."
        )
    if out is not None:
        lines.append(f"results written to {out}")
    print_tables(*(Text(line) if isinstance(line, str) else line for line in lines))
    for warning in result.warnings():
        note(warning)
