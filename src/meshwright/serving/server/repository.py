"""Change the models of a running server to those of its deployment file, which is read again for each change.

    POST /v2/repository/index                       list the models in Triton's form
    POST /v2/repository/models/NAME/load            serve a model as the file has it now, in place of the current one
    POST /v2/repository/models/NAME/unload          answer its pending requests, and serve it no more
    POST /v2/repository/update                      serve exactly the models that the file has now

Paths are those of Triton's model repository extension, except the last. Settings other than models (policy, devices,
limits) stay as they were when the server was started.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from meshwright.serving.server.servable import check_served
from meshwright.serving.server.served import copy_names
from meshwright.serving.server.supervisor import Supervisor, Unready
from meshwright.spec import Deployment, MeshwrightError, Poisson, ServedModel, ServingError, read_deployment, suggest

_PREFIX = "/v2/repository/"
# Triton's clients send it; it has no effect.
_NOTHING = {"unload_dependents": False}
_SHOWN = 500


class Repository:
    """Reads models from the deployment ``file``, and lets a supervisor serve them or no longer serve them."""

    def __init__(self, supervisor: Supervisor, file: Path) -> None:
        self._supervisor, self._file = supervisor, file

    async def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        """Answer a POST to one of the module's paths; return HTTP status and JSON document.

        ``path`` is percent-encoded, as it was sent.
        """
        try:
            _refuse_parameters(body)
            match [unquote(part) for part in path.removeprefix(_PREFIX).split("/")]:
                case ["index"]:
                    pass
                case ["update"]:
                    await self.update()
                case ["models", name, "load"]:
                    await self.load(name)
                case ["models", name, "unload"]:
                    await self.unload(name)
                case _:
                    return 404, {
                        "error": f"There is no path {path[:200]!r}; the paths are index, update, models/NAME/load and "
                        "models/NAME/unload, after /v2/repository/."
                    }
        except Unready as error:
            return 503, {"error": str(error)}
        except MeshwrightError as error:
            return 400, {"error": str(error)}
        return 200, self.index()

    def index(self) -> list[dict[str, str]]:
        """Return the list of models in the form of Triton's repository index."""
        ready = self._supervisor.is_ready
        state, reason = ("READY", "") if ready else ("UNAVAILABLE", "the server is not ready")
        return [
            {"name": one.name, "version": one.version, "state": state, "reason": reason}
            for one in self._supervisor.models
        ]

    async def load(self, name: str) -> None:
        """Serve a model, with all its copies, as the file has it now. Raises MeshwrightError."""
        known = {model.name: model for model in self._read().models}
        # A copy may be named, too.
        family = next((model for model in known.values() if name in (model.name, *copy_names(model))), None)
        if family is None:
            raise ServingError(
                f"{self._file} has no model {name[:200]!r}{suggest(name, known)}. Add it there, or choose one of "
                f"{', '.join(known)[:_SHOWN]}."
            )
        names = copy_names(family)
        former = [one.name for one in self._supervisor.models if one.model.name == family.name]
        await self._supervisor.change(
            [(each, family) for each in names], [each for each in former if each not in names]
        )

    async def unload(self, name: str) -> None:
        """Stop serving a model, with all its copies. Raises MeshwrightError."""
        models = self._supervisor.models
        leave = [one.name for one in models if name in (one.name, one.model.name)]
        if not leave:
            names = [one.name for one in models]
            raise ServingError(
                f"No model {name[:200]!r} is served{suggest(name, names)}; expected one of {', '.join(names)[:_SHOWN]}."
            )
        await self._supervisor.change([], leave)

    async def update(self) -> None:
        """Serve the models that the file has now: load new and changed ones, and remove those that it lacks.

        Raises MeshwrightError.
        """
        wanted = {name: model for model in self._read().models for name in copy_names(model)}
        former = {one.name: one.model for one in self._supervisor.models}
        come = [(name, model) for name, model in wanted.items() if name not in former or _differ(model, former[name])]
        leave = [name for name in former if name not in wanted]
        if come or leave:
            await self._supervisor.change(come, leave)

    def _read(self) -> Deployment:
        """Read the file's models, checked with this server's settings. Raises MeshwrightError."""
        read = read_deployment(self._file)
        check_served(replace(self._supervisor.deployment, models=read.models))
        return read


def _differ(model: ServedModel, other: ServedModel) -> bool:
    """Return whether a server would run something else; arrivals do not matter."""
    same = Poisson(rate=0.0)
    return replace(model, arrivals=same) != replace(other, arrivals=same)


def _refuse_parameters(body: bytes) -> None:
    """Raise ServingError for parameters that would have an effect: they are not supported."""
    try:
        document = json.loads(body) if body else {}
        parameters = document.get("parameters", {})
        unknown = [name for name, value in parameters.items() if _NOTHING.get(name) != value]
    except (ValueError, AttributeError, RecursionError):
        raise ServingError("The body is not a JSON object; the request needs no body.") from None
    if unknown:
        raise ServingError(
            f"The parameter {str(unknown[0])[:100]!r} is not supported; all settings are in the deployment's file."
        )
