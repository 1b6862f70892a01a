"""The codec of all documents: it converts frozen dataclasses to JSON or TOML and back, strictly.

A document is a mapping whose first key is ``schema``: ``"meshwright/<name>/<version>"``. The field types of the
dataclass define the legal values: scalars, ``Literal``, ``X | None``, tuples, ``dict[str, X]``, nested dataclasses,
numpy integer columns, and classes with their own scalar form (``encode_scalar`` / ``decode_scalar``). Each member of a
union of dataclasses has a ``KIND``, which is the value of the key ``kind``. Unknown keys, missing keys and wrong types
are refused with the path of the value and the nearest known key. `spec.parsing` parses files, `spec.files` writes
them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import types
import typing
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tomli_w

from meshwright.spec.errors import DocumentError, MeshwrightError, suggest
from meshwright.spec.files import write_text
from meshwright.spec.parsing import TOML_HEAD, TOML_TAIL, read_data

T = TypeVar("T")

_SCHEMA = re.compile(r"meshwright/(?P<kind>[^/]+)/[^/]+")


def encode(value: Any) -> Any:
    """Turn a dataclass (or any value that its fields may hold) into plain data for JSON.

    Fields that have their default value are left out. Raises DocumentError for a float that is not finite.
    """
    if type(value) in (int, str):  # most values
        return value
    if hasattr(value, "encode_scalar"):
        return value.encode_scalar()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        data = {"kind": value.KIND} if hasattr(value, "KIND") else {}
        for field in _written_fields(type(value)):
            item = getattr(value, field.name)
            if not _is_default(field, item):
                data[field.name] = item if type(item) in (int, str) else encode(item)
        return data
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [item if type(item) in (int, str) else encode(item) for item in value]
    if isinstance(value, dict):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        raise DocumentError(
            f"{value} cannot be written to a document; only finite numbers can. Check the computation that produced it."
        )
    return value


def decode(cls: type[T], data: Any, where: str = "") -> T:
    """Build an instance of ``cls`` from plain data.

    Raises DocumentError with the path of a value that does not fit. Paths begin with ``where`` (default: class name).
    """
    return typing.cast("T", _decode(cls, data, where or cls.__name__.lower()))


def encode_document(value: Any) -> dict[str, Any]:
    """Return a document as plain data (`encode`), with the key ``schema`` first."""
    return {"schema": _schema(type(value)), **encode(value)}


def decode_document(cls: type[T], data: Any, where: str) -> T:
    """Build an instance of ``cls`` from a document, after checking its key ``schema``.

    If the class has a function ``upgraded(data, version)``, documents of older versions are converted by it first.
    Raises DocumentError, whose messages begin with ``where``, for another schema or a value that does not fit.
    """
    expected = _schema(cls)
    if not isinstance(data, dict):
        raise DocumentError(f"{where}: expected a document {expected!r}, found {type(data).__name__}.")
    data = _upgraded(cls, data)
    if (given := data.get("schema")) != expected:
        raise DocumentError(f"{where}: expected schema {expected!r}, found {given!r}. {_schema_remedy(data, cls)}")
    return decode(cls, {key: item for key, item in data.items() if key != "schema"}, where)


def document_kind(data: Any) -> str | None:
    """Return the kind of a document by its schema: ``plan`` for ``"meshwright/plan/1"``.

    Returns None if the data is not a Meshwright document.
    """
    schema = data.get("schema") if isinstance(data, dict) else None
    match = _SCHEMA.fullmatch(schema) if isinstance(schema, str) else None
    return match["kind"] if match else None


def write_document(value: Any, path: Path | str) -> Path:
    """Write a document as TOML or JSON, by the suffix of ``path``. The file is written completely or not at all."""
    path = Path(path)
    data = encode_document(value)
    text = TOML_HEAD + tomli_w.dumps(data) + TOML_TAIL if path.suffix == ".toml" else dump_json(data)
    return write_text(text, path)


def read_document(cls: type[T], path: Path | str) -> T:
    """Read a TOML or JSON document of type ``cls``. Raises DocumentError with the file, the key and what to do."""
    path = Path(path)
    return decode_document(cls, read_data(path), str(path))


def dump_json(data: Any) -> str:
    """Return JSON text with one key or list item per line at the two outer levels, and compact text inside.

    Such files are small, and a line-by-line diff of them is readable.
    """
    return _dump(data, 0) + "\n"


def content_hash(value: Any) -> str:
    """Return the hash of a document's canonical JSON: the first 16 hexadecimal digits of its SHA-256."""
    text = json.dumps(encode_document(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _dump(data: Any, depth: int) -> str:
    if depth < 2 and isinstance(data, dict) and data:
        pad = "  " * (depth + 1)
        rows = [f"{pad}{json.dumps(key)}: {_dump(item, depth + 1)}" for key, item in data.items()]
        return "{\n" + ",\n".join(rows) + "\n" + "  " * depth + "}"
    if depth < 2 and isinstance(data, list) and data and isinstance(data[0], dict | list):
        pad = "  " * (depth + 1)
        return "[\n" + ",\n".join(pad + _dump(item, depth + 2) for item in data) + "\n" + "  " * depth + "]"
    return json.dumps(data, allow_nan=False)


def _schema(cls: type) -> str:
    return f"meshwright/{cls.__name__.lower()}/{getattr(cls, 'SCHEMA_VERSION', 1)}"


def _upgraded(cls: type, data: dict[str, Any]) -> dict[str, Any]:
    """The data of an older version in the form of the current one; unchanged if it cannot be upgraded."""
    kind, current = cls.__name__.lower(), getattr(cls, "SCHEMA_VERSION", 1)
    given, upgrade = data.get("schema"), getattr(cls, "upgraded", None)
    versions = {f"meshwright/{kind}/{version}": version for version in range(1, current)}
    if upgrade is None or not isinstance(given, str) or given not in versions:
        return data
    return {**upgrade(data, versions[given]), "schema": _schema(cls)}


def _schema_remedy(data: dict[str, Any], cls: type) -> str:
    kind = cls.__name__.lower()
    if document_kind(data) == kind:
        return "The file was written by another version of Meshwright; write it again with this one."
    return f"This is not a {kind} document; check which file the option expects."


def _is_default(field: dataclasses.Field[Any], item: Any) -> bool:
    if isinstance(item, np.ndarray):
        return field.default_factory is not dataclasses.MISSING and np.array_equal(item, field.default_factory())
    if field.default is not dataclasses.MISSING:
        return type(item) is type(field.default) and bool(item == field.default)
    if field.default_factory is not dataclasses.MISSING:
        return bool(item == field.default_factory())
    return False


@cache
def _written_fields(cls: type) -> tuple[dataclasses.Field[Any], ...]:
    return tuple(field for field in dataclasses.fields(cls) if field.init)


@cache
def _field_types(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _decode(kind: Any, data: Any, where: str) -> Any:
    if hasattr(kind, "decode_scalar"):
        try:
            return kind.decode_scalar(data)
        except (ValueError, TypeError) as error:
            raise DocumentError(f"{where}: {error}.") from None
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(typing.cast("type", kind), data, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        if data not in arguments or isinstance(data, bool) != isinstance(arguments[0], bool):
            hint = suggest(data, [str(item) for item in arguments]) if isinstance(data, str) else ""
            raise DocumentError(f"{where}: {data!r} is not one of {', '.join(map(repr, arguments))}{hint}.")
        return data
    if origin in (typing.Union, types.UnionType):
        return _decode_optional(arguments, data, where)
    if origin is tuple:
        return _decode_tuple(arguments, data, where)
    if origin is dict:
        if not isinstance(data, dict):
            raise DocumentError(f"{where}: expected a table, found {type(data).__name__}.")
        return {str(key): _decode(arguments[1], item, f"{where}.{key}") for key, item in data.items()}
    if origin is np.ndarray:
        return _decode_array(arguments, data, where)
    return _decode_scalar(kind, data, where)


def _decode_dataclass(cls: type, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise DocumentError(
            f"{where}: expected a table of {cls.__name__} (keys and values), found {type(data).__name__}."
        )
    renamed = getattr(cls, "RENAMED_KEYS", {})
    data = {renamed.get(key, key): value for key, value in data.items()}
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for key in data:
        if key not in fields:
            raise DocumentError(f"{where}: unknown key {key!r}{suggest(str(key), fields)}.")
    kinds = _field_types(cls)
    values = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _decode(kinds[name], data[name], f"{where}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise DocumentError(f"{where}: key {name!r} is missing.")
    return cls(**values)


def _decode_optional(arguments: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in arguments:
        return None
    rest = [item for item in arguments if item is not type(None)]
    if all(hasattr(item, "KIND") for item in rest):
        return _decode_kind({item.KIND: item for item in rest}, data, where)
    if len(rest) != 1:
        raise TypeError(f"{where}: unions other than X | None are not part of the codec")
    return _decode(rest[0], data, where)


def _decode_kind(known: dict[str, type], data: Any, where: str) -> Any:
    """One of a union of dataclasses, by its key ``kind``."""
    if not isinstance(data, dict):
        raise DocumentError(f"{where}: expected a table, found {type(data).__name__}.")
    if "kind" not in data:
        raise DocumentError(f"{where}: key 'kind' is missing; expected one of {', '.join(map(repr, known))}.")
    if not isinstance(data["kind"], str) or data["kind"] not in known:
        raise DocumentError(f"{where}: kind {data['kind']!r} is not known{suggest(str(data['kind']), known)}.")
    kind = data["kind"]
    try:
        return _decode_dataclass(known[kind], {key: data[key] for key in data if key != "kind"}, f"{where} ({kind})")
    except DocumentError:
        raise
    except MeshwrightError as error:
        # An error of the class's own checks does not contain the path.
        raise DocumentError(f"{where}: {error}") from None


def _decode_tuple(arguments: tuple[Any, ...], data: Any, where: str) -> Any:
    if not isinstance(data, list | tuple):
        raise DocumentError(f"{where}: expected a list, found {type(data).__name__}.")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_decode(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if len(data) != len(arguments):
        raise DocumentError(f"{where}: expected {len(arguments)} values, found {len(data)}.")
    return tuple(
        _decode(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(arguments, data, strict=True))
    )


def _decode_array(arguments: tuple[Any, ...], data: Any, where: str) -> Any:
    dtype = np.dtype(typing.get_args(arguments[1])[0])
    if not isinstance(data, list) or any(type(item) is not int for item in data):
        raise DocumentError(f"{where}: expected a list of integers.")
    try:
        return np.array(data, dtype=dtype)
    except OverflowError:
        raise DocumentError(f"{where}: a value does not fit {dtype.name}.") from None


def _decode_scalar(kind: Any, data: Any, where: str) -> Any:
    if kind is float and type(data) in (int, float):
        try:
            value = float(data)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value):
            raise DocumentError(f"{where}: {data} is not a finite number.")
        return value
    if kind in (int, str, bool) and type(data) is kind:
        return data
    if kind not in (int, float, str, bool):
        raise TypeError(f"{where}: {kind} is not part of the codec")
    raise DocumentError(f"{where}: expected {kind.__name__}, found {data!r}.")
