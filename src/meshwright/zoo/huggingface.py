"""Hugging Face configurations: ``config.json`` → a model to train, without weights, tokenizer or download.

The file says type and sizes; transformers builds the module from it with fresh weights. Before that, the file is
checked: nothing in it may name code to be loaded (``auto_map``), and numbers that would make transformers build lists
or tables without end are refused.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

from meshwright.spec import ModelReferenceError
from meshwright.zoo.huggingface_tasks import Task

INSTALL = "pip install 'meshwright[hf]'"

# The deepest published models have some 130 layers, the widest 512 experts in a layer; each is a module, or several.
MAX_LAYERS = 512
MAX_EXPERTS = 4096
MAX_EXPERT_MODULES = 100_000
MAX_LABELS = 2**20
# Vocabularies have 3e5 words, contexts 1e7 positions.
MAX_NUMBER = 2**24
# By a word in the key; a key that also names a size (`shared_expert_intermediate_size`) does not count.
_COUNTS = (
    ("labels", re.compile(r"label"), MAX_LABELS),
    ("experts", re.compile(r"expert"), MAX_EXPERTS),
    ("layers", re.compile(r"layer|depth|block|stage"), MAX_LAYERS),
)
_SIZE = re.compile(r"size|dim|width|rank|length")
# Counts and widths that are at least one in every model; others may be 0 or -1, for "none" or "all".
_POSITIVE = re.compile(
    r"(n|num|num_hidden|(num_)?encoder|(num_)?decoder)_layers?"
    r"|(n|num|num_attention|num_key_value|encoder_attention|decoder_attention)_heads?"
    r"|n_(embd|ctx|positions)|d_(model|ff|kv)|dim|hidden_(size|dim)|intermediate_size|((en|de)coder_)?ffn_dim"
    r"|head_dim|vocab_size|max_(position_embeddings|source_positions|target_positions)"
    r"|image_size|patch_size|num_(channels|mel_bins)"
)
# Whole numbers that count nothing: bases of rotary embeddings, seeds.
_NO_COUNT = re.compile(r"theta|base|seed")


def load_huggingface(data: dict[str, Any], where: str) -> Task:
    """The task of a configuration, ready for `batch` and `build`; ``where`` names the file in errors.

    Raises ModelReferenceError if transformers is missing, or refuses the configuration, or has no task for it.
    """
    _check(data, where)
    classes = _import_classes(where)
    with classes.quiet_offline(), _refused_by(classes.VERSION, where):
        config = classes.make_config(dict(data), where)
        task, model_class = classes.find_task(config, where)
        classes.choose_implementations(config, model_class, data, where)
        return task.of(config, model_class)


def make_huggingface(task: Task, where: str, *, fake: bool) -> tuple[Any, Any, Any]:
    """Module, inputs and targets of a task; ``fake`` says that they are built as fake tensors.

    Raises ModelReferenceError with transformers' own message if they cannot be built.
    """
    classes = _import_classes(where)
    with classes.quiet_offline(), _refused_by(classes.VERSION, where):
        inputs, targets = task.batch()
        return classes.build_unallocated(task) if fake else task.build(), inputs, targets


class _refused_by:  # noqa: N801 - a context manager, read as one
    """Turn what transformers raises into a ModelReferenceError with its first line."""

    def __init__(self, version: str, where: str) -> None:
        self._version, self._where = version, where

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        if not isinstance(error, Exception) or isinstance(error, ModelReferenceError):
            return
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ModelReferenceError(
            f"{self._where}: transformers {self._version} cannot build this configuration ({type(error).__name__}: "
            f"{' '.join(lines)[:300] or 'no message'}). Correct the configuration."
        ) from error


def _import_classes(where: str) -> Any:
    try:
        return importlib.import_module("meshwright.zoo.huggingface_classes")
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("transformers", "huggingface_hub"):
            raise
        raise ModelReferenceError(
            f"{where} is the configuration of a Hugging Face model, which needs transformers 5 ({error}). "
            f"Run {INSTALL}."
        ) from None


def _check(data: dict[str, Any], where: str) -> None:
    if not isinstance(data.get("model_type"), str):
        raise ModelReferenceError(
            f"{where}: 'model_type' is {data.get('model_type')!r}; expected the name of a type of model, such as "
            "'gpt2'. Add it."
        )
    if data.get("auto_map"):
        raise ModelReferenceError(
            f"{where}: 'auto_map' names code of its own, and code from a configuration is never loaded. Remove the key "
            "if transformers has this type of model, or give the model as path/to/file.py:function."
        )
    if data.get("quantization_config"):
        raise ModelReferenceError(
            f"{where}: 'quantization_config' describes quantised weights, which are not trained here. Remove the key "
            "to plan the model with full weights."
        )
    layers = experts = 1
    for path, number in _numbers(data, ""):
        kind, limit = _limit(path)
        if kind == "layers":
            layers = max(layers, number)
        elif kind == "experts":
            experts = max(experts, number)
        if limit is not None and abs(number) > limit:
            raise _out_of_range(where, path, number, f"at most {limit}")
        if number < 1 and _POSITIVE.fullmatch(_key(path)):
            raise _out_of_range(where, path, number, "at least 1")
    if layers * experts > MAX_EXPERT_MODULES:
        raise _out_of_range(where, "layers times experts", layers * experts, f"at most {MAX_EXPERT_MODULES}")


def _out_of_range(where: str, path: str, number: int, expected: str) -> ModelReferenceError:
    return ModelReferenceError(f"{where}: {path} is {number}; expected {expected}. Correct the configuration.")


def _key(path: str) -> str:
    """The last key of a path, without its places in lists."""
    return re.sub(r"\[\d+\]", "", path).rpartition(".")[2]


def _limit(path: str) -> tuple[str, int | None]:
    """What the number at a path counts, and its limit."""
    key = _key(path)
    if _NO_COUNT.search(key):
        return "no count", None
    for kind, pattern, limit in _COUNTS:
        if pattern.search(key) and not _SIZE.search(key):
            return kind, limit
    return "size", MAX_NUMBER


def _numbers(value: Any, path: str) -> Iterator[tuple[str, int]]:
    """Paths and values of all whole numbers of plain data; tables of labels aside."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key not in ("id2label", "label2id"):
                yield from _numbers(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _numbers(item, f"{path}[{index}]")
    elif isinstance(value, int) and not isinstance(value, bool):
        yield path, value
