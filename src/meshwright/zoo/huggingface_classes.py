"""The only module that imports transformers: find the configuration class, model class and task of a configuration.

Transformers' own tables (its Auto classes) decide which class trains which type of model. Nothing is loaded from a hub:
models are built from their configuration alone, in offline mode.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers.initialization import meta_device_safe_creation_ops

from meshwright.spec import ModelReferenceError, suggest
from meshwright.zoo.huggingface import (
    CausalLanguageModel,
    MaskedLanguageModel,
    SequenceClassifier,
    SequenceToSequence,
    SpeechToText,
    Task,
    VisionClassifier,
)

VERSION = transformers.__version__

# In order of preference for a type that several tables name: what it was trained on first (Whisper can be a causal
# language model, BERT too, BART a masked one).
_TASKS: tuple[tuple[type[Task], Any], ...] = (
    (SpeechToText, transformers.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING),
    (SequenceToSequence, transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING),
    (MaskedLanguageModel, transformers.MODEL_FOR_MASKED_LM_MAPPING),
    (CausalLanguageModel, transformers.MODEL_FOR_CAUSAL_LM_MAPPING),
    (VisionClassifier, transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING),
    (SequenceClassifier, transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING),
)
# Speech models read many kinds of input; this is the type whose input is described here.
_SPEECH_TYPES = ("whisper",)


@contextmanager
def quiet_offline() -> Iterator[None]:
    """Let transformers work without network, warnings and logs while the block runs."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            patch("huggingface_hub.constants.HF_HUB_OFFLINE", new=True),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)


def build_unallocated(task: Task) -> Any:
    """Return the task's model with fake CPU tensors; to be called inside a FakeTensorMode.

    The model is first built on device "meta", as transformers does before it loads weights. There, unlike under fake
    tensors, no initial weights are drawn, and numbers that ``__init__`` reads from a tensor (rates of drop paths) are
    real.
    """
    with unset_fake_temporarily(), torch.device("meta"), meta_device_safe_creation_ops():
        model = task.build()
    model.to_empty(device="cpu")
    model.tie_weights()
    return model


def make_config(data: dict[str, Any], where: str) -> Any:
    """Return an instance of transformers' configuration class for ``data``; exceptions of the class are passed on.

    Raises ModelReferenceError if transformers does not have this model type.
    """
    kind = data["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        raise ModelReferenceError(
            f"{where}: transformers {VERSION} has no model type {kind!r}{_near(kind, transformers.CONFIG_MAPPING)}. "
            "Correct 'model_type', or give the model as path/to/file.py:function."
        )
    return transformers.CONFIG_MAPPING[kind].from_dict(data)


def find_task(config: Any, where: str) -> tuple[type[Task], type]:
    """Return the task for a configuration, and the model class to train.

    If the configuration's ``architectures`` names a trainable class, that class is taken. If it names a model without a
    head (``GPT2Model``) or nothing, the usual class of the model type is taken. Raises ModelReferenceError if no known
    task suits the class.
    """
    # Models of several parts (CLIP) keep what a batch needs in the configurations of the parts.
    known = [
        (task, item)
        for task, table in _TASKS
        if all(hasattr(config, name) for name in task.reads)
        for item in _classes(table, config)
    ]
    names = list(getattr(config, "architectures", None) or [])
    for name in names:
        for task, item in known:
            if item.__name__ == name:
                return _checked(task, item, config, where)
    bare = [item.__name__ for table in _bare_tables() for item in _classes(table, config)]
    if known and (not names or names[0] in bare):
        return _checked(*known[0], config, where)
    asked = f"The class {names[0]!r} of 'architectures'" if names else f"The model type {config.model_type!r}"
    choice = (
        f"Name {' or '.join(dict.fromkeys(item.__name__ for _, item in known))} there, or give" if known else "Give"
    )
    raise ModelReferenceError(
        f"{where}: {asked} has none of the tasks for which there are a batch and a loss here: causal, masked and "
        "sequence-to-sequence language models, speech to text, classification of images and of sequences. "
        f"{choice} the model as path/to/file.py:function."
    )


def choose_implementations(config: Any, model_class: Any, data: dict[str, Any], where: str) -> None:
    """Set how attention and experts are computed, so that no shape depends on data, and switch the cache off.

    Attention is "sdpa" if the class supports it, else "eager". Experts are transformers' default ("grouped_mm", whose
    result has a fixed shape). The configuration may choose another implementation. "eager" experts loop over data, so
    capture refuses them later. Raises ModelReferenceError for an unknown implementation.
    """
    for key, allowed in (
        ("attn_implementation", ("sdpa", "eager")),
        ("experts_implementation", ("grouped_mm", "batched_mm", "eager")),
    ):
        given = data.get(key)
        if given is not None and given not in allowed:
            raise ModelReferenceError(
                f"{where}: {key} is {given!r}; expected {' or '.join(allowed)}. Leave the key out for the default."
            )
    supports_sdpa = getattr(model_class, "_supports_sdpa", False)
    config._attn_implementation = data.get("attn_implementation") or ("sdpa" if supports_sdpa else "eager")
    # A cache of keys and values serves generation only; in training it would be one more output of every layer.
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))):
        if hasattr(part, "use_cache"):
            part.use_cache = False


def _classes(table: Any, config: Any) -> list[Any]:
    found = table.get(type(config), None)
    return list(found) if isinstance(found, list | tuple) else [found] if found is not None else []


def _bare_tables() -> tuple[Any, ...]:
    return transformers.MODEL_MAPPING, transformers.MODEL_FOR_PRETRAINING_MAPPING


def _checked(task: type[Task], item: type, config: Any, where: str) -> tuple[type[Task], type]:
    if task is SpeechToText and config.model_type not in _SPEECH_TYPES:
        raise ModelReferenceError(
            f"{where}: speech to text is known here for {', '.join(_SPEECH_TYPES)}, not for {config.model_type!r}. "
            "Give the model with its batch as path/to/file.py:function."
        )
    return task, item


def _near(kind: str, known: Any) -> str:
    # All names would fill a screen; only a near one is worth saying.
    hint = suggest(kind, list(known))
    return hint if "did you mean" in hint else ""


INSTALL = "pip install 'meshwright[hf]'"
