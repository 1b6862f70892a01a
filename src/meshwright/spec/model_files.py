"""Model references without code (`read_model_file`): stored graphs, Hugging Face configurations, ids of its Hub.

Graphs and configurations are both ``.json`` files, so the content decides: a stored graph has the key ``schema``, a
configuration has ``model_type``. A folder means its ``config.json``, an id of the Hugging Face Hub the ``config.json``
of that repository (`find_config`). Nothing in a file is executed.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.extras import explain_missing
from meshwright.spec.codec import decode_document, document_kind
from meshwright.spec.errors import DocumentError, ModelReferenceError
from meshwright.spec.files import read_regular
from meshwright.spec.graph import Graph
from meshwright.spec.own_code import split_reference
from meshwright.spec.parsing import read_data

CONFIG_NAME = "config.json"
# Published configurations have 1 kB to 1 MB, the longest those that name 21,843 classes of images.
MAX_CONFIG_BYTES = 4 * 2**20
TIMEOUT_S = 10
# Names of users, organisations and repositories that the Hub allows.
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
# References to files, whose folder may not exist.
_FILES = (".json", ".toml", ".py")
_BY_HAND = "Give the file itself: save {url} and plan with that, or set HF_HOME to a cache that holds it."


def is_hub_id(reference: str) -> bool:
    """Return whether a reference has the form of an id of the Hub (``owner/name``) and is not an existing path."""
    return (
        _ID.fullmatch(reference) is not None
        and not reference.endswith(_FILES)
        and not Path(reference).expanduser().exists()
    )


# ``Qwen/Qwen2.5-7B`` → the path of its ``config.json``. The file comes from huggingface_hub's cache if it is there,
# else from the network. Weights, tokenizers and code are never downloaded; the file is read as data, with limits on its
# size.
def find_config(model_id: str) -> Path:
    """Return the path of ``config.json`` of a model of the Hub, from the local cache or downloaded.

    Raises ModelReferenceError if it is not available.
    """
    try:
        from huggingface_hub import (  # noqa: PLC0415  (an extra)
            constants,
            get_hf_file_metadata,
            hf_hub_download,
            try_to_load_from_cache,
        )
        from huggingface_hub.errors import (  # type: ignore[attr-defined]  # noqa: PLC0415
            EntryNotFoundError,
            GatedRepoError,
            HFValidationError,
            HTTPError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
        )
    except ImportError:
        raise ModelReferenceError(
            explain_missing(f"{model_id!r} is a model of the Hugging Face Hub, which", "huggingface_hub")
        ) from None

    known = try_to_load_from_cache(model_id, CONFIG_NAME)
    if isinstance(known, str):
        return Path(known)
    url = f"{constants.ENDPOINT}/{model_id}/resolve/main/{CONFIG_NAME}"
    by_hand = _BY_HAND.format(url=url)
    try:
        # Unlike a download, this does not retry for half a minute without a network.
        size = get_hf_file_metadata(url, timeout=TIMEOUT_S).size or 0
        if size > MAX_CONFIG_BYTES:
            raise ModelReferenceError(
                f"{url} has {size} bytes; configurations are limited to {MAX_CONFIG_BYTES}. Check the model's id."
            )
        return Path(hf_hub_download(model_id, CONFIG_NAME))
    except GatedRepoError:
        raise ModelReferenceError(
            f"{model_id!r} is gated: its owner has to grant access. Ask for it on {constants.ENDPOINT}/{model_id}, "
            "then set HF_TOKEN, or run `hf auth login`."
        ) from None
    except RepositoryNotFoundError:
        raise ModelReferenceError(
            f"There is no file or folder {model_id!r} here, and the Hugging Face Hub has no model {model_id!r} that "
            "can be read from here. Check the name, or set HF_TOKEN for a private one. The models that ship with "
            "Meshwright: `meshwright show zoo`."
        ) from None
    except EntryNotFoundError:
        raise ModelReferenceError(
            f"{model_id!r} holds no {CONFIG_NAME}, which would describe the model. Give a model of your "
            "own as path/to/file.py:function."
        ) from None
    except (HTTPError, OfflineModeIsEnabled, HFValidationError, OSError, ValueError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelReferenceError(
            f"There is no file or folder {model_id!r} here. As a model of the Hugging Face Hub, its {CONFIG_NAME} is "
            f"not in the cache, and could not be fetched from {constants.ENDPOINT} ({lines[0][:200]}). {by_hand}"
        ) from None


# A stored graph has its schema as its first key (spec.codec), within this number of bytes.
_GRAPH_MARK, _HEAD_BYTES = b'"meshwright/graph/', 256


def read_model_file(reference: str) -> Graph | dict[str, Any] | None:
    """Return the stored graph or the configuration (a dict) that a reference names.

    Returns None if the reference is neither a ``.json`` file, nor a folder, nor an id of the Hub. Raises DocumentError
    for a file that is damaged or neither of the two, ModelReferenceError for a folder or an id without a configuration.
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
                "folder with that file, a .toml or .json file, or path/to/file.py:function."
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
    """Return whether a model reference names a stored graph; only the first bytes of the file are read."""
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
            f"{path}: it has more than {MAX_CONFIG_BYTES} bytes, the limit of configurations, and does not start like "
            "a stored graph. Check which file was meant."
        )


def check_model_is_here(reference: str) -> None:
    """Raise ModelReferenceError if a plan's model is a file that does not exist, seen from the working directory."""
    own = split_reference(reference)
    path = own[0] if own is not None else Path(reference).expanduser()
    if path.suffix in (".py", ".json") and not path.exists():
        raise ModelReferenceError(
            f"The plan's model is {reference!r}, a path relative to the folder in which it was made; no such file "
            f"exists relative to {Path.cwd()}. Start in the folder to which the path is relative."
        )
