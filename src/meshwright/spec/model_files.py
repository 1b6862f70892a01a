"""Model references that are data files: a stored graph, or the configuration of a Hugging Face model.

Both are called ``something.json``, so the content decides: a stored graph has ``schema``, a configuration has
``model_type``. A folder stands for its ``config.json``, an id of the Hugging Face Hub for the one there (`hub`).
Nothing in a file is executed.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.spec.codec import decode_document, document_kind
from meshwright.spec.errors import DocumentError, ModelReferenceError
from meshwright.spec.files import read_regular
from meshwright.spec.graph import Graph
from meshwright.spec.hub import CONFIG_NAME, MAX_CONFIG_BYTES, find_config, is_hub_id
from meshwright.spec.own_code import split_reference
from meshwright.spec.parsing import read_data

# A stored graph has its schema as its first key (spec.codec), within this number of bytes.
_GRAPH_MARK, _HEAD_BYTES = b'"meshwright/graph/', 256


def read_model_file(reference: str) -> Graph | dict[str, Any] | None:
    """The graph or configuration of a reference; None if it is not such a file, folder or id of the Hub.

    Raises DocumentError for a file that is neither or that is damaged, ModelReferenceError for a folder without a
    configuration.
    """
    path = Path(reference).expanduser()
    if is_hub_id(reference):
        path = find_config(reference)
    elif path.suffix != ".json":
        if not path.is_dir():
            return None
        path = path / CONFIG_NAME
        if not path.exists():
            raise ModelReferenceError(
                f"The folder {reference!r} holds no {CONFIG_NAME}; expected the folder of a Hugging Face model. Give a "
                "folder with that file, or another kind of reference."
            )
    _refuse_large_config(path)
    data = read_data(path)
    if document_kind(data) is not None:
        return decode_document(Graph, data, str(path))
    if isinstance(data, dict) and ("model_type" in data or "architectures" in data):
        return data
    raise DocumentError(
        f"{path}: neither a stored graph (whose 'schema' is 'meshwright/graph/...') nor the "
        "configuration of a Hugging Face model (which has a 'model_type'). Check which file was meant."
    )


def is_stored_graph(reference: str) -> bool:
    """Whether a model reference is a stored graph, by the first bytes of its file."""
    if reference.endswith(".json"):
        with suppress(DocumentError):
            return _begins_as_graph(Path(reference).expanduser())
    return False


def _begins_as_graph(path: Path) -> bool:
    return _GRAPH_MARK in read_regular(path, _HEAD_BYTES)


def _refuse_large_config(path: Path) -> None:
    """Refuse, before it is parsed, a large file that does not start like a graph: only graphs are that large."""
    try:
        if path.stat().st_size <= MAX_CONFIG_BYTES:
            return
    except OSError:
        return  # reading it reports the error
    if not _begins_as_graph(path):
        raise DocumentError(
            f"{path}: more than {MAX_CONFIG_BYTES} bytes, the limit of configurations, and it does not start "
            "like a stored graph. Check which file was meant."
        )


def check_model_is_here(reference: str) -> None:
    """Raise ModelReferenceError if the plan's model is a file that does not exist relative to this folder."""
    own = split_reference(reference)
    path = own[0] if own is not None else Path(reference).expanduser()
    if path.suffix in (".py", ".json") and not path.exists():
        raise ModelReferenceError(
            f"The plan's model is {reference!r}, a path relative to the folder in which it was made; no such file "
            f"exists relative to {Path.cwd()}. Start in the folder to which the path is relative."
        )
