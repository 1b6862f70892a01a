"""``meshwright serve models``: list a server's models; load and unload models while it serves."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import typer

from meshwright.cli.json_output import print_json
from meshwright.cli.models import JsonOption
from meshwright.cli.output import print_tables
from meshwright.spec.errors import ServingError

# Large models take their time to load.
_LIMIT_S = 3600.0
_MOST_BYTES = 2**24


def models(
    url: Annotated[str, typer.Argument(metavar="ADMIN-URL", help="The server's admin address: http://127.0.0.1:8002.")],
    load: Annotated[
        list[str] | None, typer.Option(help="Load a model as it is in the deployment's file now. Can be repeated.")
    ] = None,
    unload: Annotated[
        list[str] | None, typer.Option(help="Unload a model after its queued requests are answered. Can be repeated.")
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
            f"No server's admin port answers at {url}: {why}. `meshwright serve` prints its address."
        ) from None
    finally:
        connection.close()
    if answer.status != 200:
        said = document.get("error", document) if isinstance(document, dict) else document
        raise ServingError(f"The server answered {answer.status}: {said}")
    return document
