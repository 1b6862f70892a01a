"""``meshwright serve timeline URL``: what happens to each request of a server for some seconds, for Perfetto."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.output import note
from meshwright.spec.errors import DocumentError, ServingError
from meshwright.spec.files import refuse_replacing, write_bytes
from meshwright.spec.units import format_count, format_seconds

# What the server needs beside the recording itself, at most.
_PATIENCE_S = 60.0
# As other traces: a higher level takes longer and saves little.
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
            f"What {url} answered (status {status}) is no timeline; expected the address of a server's admin port, "
            "which `meshwright serve` prints when it is ready."
        ) from None
    write_bytes(gzip.compress(content, _LEVEL, mtime=0) if out.suffix == ".gz" else content, out)
    print(f"{requests} and {batches} batches in {format_seconds(told['seconds'])}, written to {out}.")
    print("Open it at https://ui.perfetto.dev.")
    for kind, words in (("cut", "had more to note than is kept"), ("missing", "did not say what happened")):
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
