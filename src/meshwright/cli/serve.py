"""``meshwright serve``: serve models under deadlines.

``serve load`` sends requests to a server and measures its answers. ``serve timeline URL`` records what happens to each
request of a server for some seconds, for Perfetto.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperGroup

from meshwright.cli.json_output import name_schema, print_json
from meshwright.cli.models import JsonOption
from meshwright.cli.output import note, print_tables, terminal_sink
from meshwright.cli.serve_models import models
from meshwright.cli.serve_run import replay, run
from meshwright.spec.codec import dump_json
from meshwright.spec.deployment import Arrivals, Gamma, Poisson, Trace, read_deployment
from meshwright.spec.errors import DocumentError, ServingError
from meshwright.spec.files import refuse_replacing, write_bytes, write_text
from meshwright.spec.quantities import Seconds
from meshwright.spec.units import format_count, format_percent, format_seconds

if TYPE_CHECKING:
    from meshwright.serving.load import LoadResult, RequestStream


# The most seconds that the server needs beside the recording itself.
_PATIENCE_S = 60.0
# As for other traces: a higher level takes longer and saves little.
_LEVEL = 3


def timeline(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server's admin port: http://127.0.0.1:8002.")],
    seconds: Annotated[float, typer.Option(help="How long it records.", min=0.1, max=30.0)] = 2.0,
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
    for kind, words in (("cut", "had more events than are kept"), ("missing", "did not say what happened")):
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
        typer.Option(help="With --rate: gaps of a gamma distribution; 1 is Poisson, 0.1 comes in bursts.", min=1e-3),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Arrival times from a file instead of --rate: one per line, in seconds.")
    ] = None,
    deployment: Annotated[
        Path | None,
        typer.Option(
            help="Models, arrivals and deadlines of a deployment (.toml); copies of cat are cat-0, cat-1, ..."
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
    processes: Annotated[int, typer.Option(help="Processes that send.", min=1, max=64)] = 1,
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
        raise DocumentError(f"{option} and {given[0]} both set what arrives. Give one of them.")


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
            f"99 % of those with status 503 were answered within {format_seconds(result.total.rejected_p99_s)}."
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
