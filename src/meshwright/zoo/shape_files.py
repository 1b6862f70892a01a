"""Shape files: the sizes of the zoo's models as TOML, each with its source (`load_shape`)."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from meshwright.spec import DocumentError, ModelReferenceError, decode_document, suggest
from meshwright.spec.codec import document_kind
from meshwright.spec.parsing import read_data
from meshwright.zoo.bert import BERTShape
from meshwright.zoo.diffusion import DDPMShape
from meshwright.zoo.dlrm import DLRMShape
from meshwright.zoo.gnmt import GNMTShape
from meshwright.zoo.gpt import GPTShape
from meshwright.zoo.llama import LlamaShape
from meshwright.zoo.lora import LoRAShape
from meshwright.zoo.mixtral import MixtralShape
from meshwright.zoo.resnet import ResNetShape
from meshwright.zoo.t5 import T5Shape
from meshwright.zoo.unet import UNetShape
from meshwright.zoo.vgg import VGGShape

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

Shape = (
    GPTShape
    | LlamaShape
    | LoRAShape
    | MixtralShape
    | BERTShape
    | T5Shape
    | GNMTShape
    | DLRMShape
    | ResNetShape
    | VGGShape
    | UNetShape
    | DDPMShape
)

# By the word that a shape file's `schema` has in its middle.
FAMILIES: dict[str, type[Shape]] = {family.__name__.lower(): family for family in get_args(Shape)}


def zoo_names() -> tuple[str, ...]:
    """Return the names of the shipped models (the zoo), sorted."""
    return tuple(sorted(item.name.removesuffix(".toml") for item in _folder().iterdir() if item.name.endswith(".toml")))


# The deepest model of the zoo has 126 layers; torch makes a thousand per second.
MAX_LAYERS = 10_000
# Far above any vocabulary, context or width; products of two still fit int64.
MAX_SIZE = 2**31 - 1


def load_shape(reference: str) -> Shape:
    """Read the shape (sizes) of a model, by the name of a shipped model or from a .toml file of the same form.

    Raises ModelReferenceError for a name that is not shipped, DocumentError for a file that cannot be read.
    """
    if reference.endswith(".toml"):
        return _read_shape(Path(reference).expanduser())
    if reference not in zoo_names():
        raise ModelReferenceError(
            f"No model {reference!r} is shipped{suggest(reference, zoo_names())}. "
            "Give a shipped name, a shape file (my-model.toml), or your own model as path/to/file.py:function."
        )
    with resources.as_file(_folder() / f"{reference}.toml") as path:
        return _read_shape(path)


def _folder() -> Traversable:
    return resources.files("meshwright.zoo") / "shapes"


def _read_shape(path: Path) -> Shape:
    data: Any = read_data(path)
    kind = document_kind(data)
    if kind not in FAMILIES:
        schema = data.get("schema") if isinstance(data, dict) else None
        known = ", ".join(f"meshwright/{name}/{family.SCHEMA_VERSION}" for name, family in FAMILIES.items())
        raise DocumentError(f"{path}: schema {schema!r} is not a model's shape; expected one of {known}.")
    _check_amounts(data, path)
    return decode_document(FAMILIES[kind], data, str(path))


def _check_amounts(data: dict[str, Any], path: Path) -> None:
    """Refuse sizes that no model has, before modules are made one by one for them."""
    for key, value in data.items():
        most = MAX_LAYERS if "layers" in key else MAX_SIZE
        if isinstance(value, int) and value > most:
            raise DocumentError(f"{path}: {key} is larger than {most:,}, the limit of shape files. Correct it.")
