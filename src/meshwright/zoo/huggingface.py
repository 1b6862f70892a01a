"""Models from Hugging Face configurations: read a ``config.json`` (`load_huggingface`), make batch and loss (`Task`).

No weights, tokenizer or download are needed. The file gives the type and the sizes of the model; transformers builds
the module from it with newly initialised weights. The file is checked before: it may not name code to be loaded
(``auto_map``), nor have numbers with which transformers would build endless lists or tables.
"""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from meshwright.spec import ModelReferenceError
from meshwright.zoo.batch_examples import cross_entropy, random_tokens, token_cross_entropy

# A position that no loss is taken at: the default of torch's cross_entropy.
IGNORED = -100
# Share of the tokens that a masked language model predicts (Devlin et al., "BERT", 2018, section 3.1).
MASKED_SHARE = 0.15
# Where neither the configuration nor the user says it: Raffel et al., "T5" (2019), section 3.1.2.
LENGTH_WITHOUT_POSITIONS = 512
# Models may have positions for more than they are trained with: Llama 3 for 131,072 tokens, in pretraining mostly 8,192
# ("The Llama 3 Herd of Models", 2024, section 3.4).
LONGEST_BY_DEFAULT = 8192
DEFAULT_IMAGE_SIZE = 224


# A task has sizes that `replace` changes, a synthetic batch, a loss, and `build`, as a shape of a model of the zoo.
# Losses are cross-entropies of the output's ``logits``, over all tokens for text, over the classes otherwise; they are
# computed outside of the module, in its own precision. The loss of routers of experts (``aux_loss``) is added if the
# configuration says ``output_router_logits``, at its ``router_aux_loss_coef``, as transformers adds it. Source of the
# rules per task: the documentation of the classes in transformers 5, and the papers named below.
@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model class with its configuration; each subclass makes batches and the loss of one kind of training.

    ``reads`` lists the fields of the configuration that the subclass needs for its batches.
    """

    reads: ClassVar[tuple[str, ...]] = ()

    config: Any
    model_class: type
    batch_size: int = 4

    @classmethod
    def of(cls, config: Any, model_class: type) -> Task:
        """Return the task with the sizes that the configuration gives."""
        return cls(config=config, model_class=model_class)

    def build(self) -> Any:
        """Return the model with newly initialised weights, in training mode, in torch's default dtype."""
        model = self.model_class(copy.deepcopy(self.config))
        model.train()
        return model

    def batch(self) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...]]:
        """Return a synthetic batch: keyword arguments of the model, and the targets of the loss."""
        raise NotImplementedError

    def loss(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of all tokens."""
        return token_cross_entropy(outputs.logits, targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequences(Task):
    """Sequences of tokens, no longer than the model has positions for."""

    reads: ClassVar[tuple[str, ...]] = ("vocab_size",)

    sequence_length: int = LENGTH_WITHOUT_POSITIONS

    def __post_init__(self) -> None:
        limit = _positions(self.config)
        if limit is not None and self.sequence_length > limit:
            raise ModelReferenceError(
                f"Sequences of {self.sequence_length} tokens were asked for, but this {self.config.model_type} has "
                f"{limit} positions; choose a sequence length from 1 to {limit}."
            )

    @classmethod
    def of(cls, config: Any, model_class: type) -> _Sequences:
        """The task with sequences as long as there are positions, up to `LONGEST_BY_DEFAULT`."""
        limit = _positions(config)
        if limit is None:
            return cls(config=config, model_class=model_class)
        # Tables of positions may hold fewer than they say: RoBERTa's 514 serve 512 tokens.
        length = min(limit - limit % 8 if limit > 8 else limit, LONGEST_BY_DEFAULT)
        return cls(config=config, model_class=model_class, sequence_length=length)

    def _tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        return random_tokens(self.batch_size, self.sequence_length, self.config.vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalLanguageModel(_Sequences):
    """The task of predicting the next token of a sequence."""

    def batch(self) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...]]:
        """Return tokens (batch, sequence), and as targets the same sequences shifted by one token."""
        tokens, targets = self._tokens()
        return {"input_ids": tokens}, (targets,)

    def loss(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of all tokens, plus the routers' loss if ``output_router_logits`` is set."""
        found = token_cross_entropy(outputs.logits, targets)
        routers = getattr(outputs, "aux_loss", None) if getattr(self.config, "output_router_logits", False) else None
        return found if routers is None else found + self.config.router_aux_loss_coef * routers


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedLanguageModel(_Sequences):
    """The task of predicting 15 % of the tokens from the others, the same number (at least 1) in every sequence."""

    def batch(self) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...]]:
        """Return tokens and targets (batch, sequence): original tokens at masked positions, `IGNORED` elsewhere."""
        tokens, _ = self._tokens()
        num_masked = max(1, round(MASKED_SHARE * self.sequence_length))
        masked = torch.rand(tokens.shape).argsort(dim=1) < num_masked
        # The token at a masked place is drawn again, as in one of ten cases of the source; configurations name no mask.
        drawn = torch.randint(self.config.vocab_size, tokens.shape)
        return {"input_ids": torch.where(masked, drawn, tokens)}, (torch.where(masked, tokens, IGNORED),)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceClassifier(_Sequences):
    """The task of classifying sequences of tokens."""

    def batch(self) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...]]:
        """Return tokens (batch, sequence), and as targets classes (batch,)."""
        return {"input_ids": self._tokens()[0]}, (torch.randint(self.config.num_labels, (self.batch_size,)),)

    def loss(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of the samples."""
        return cross_entropy(outputs.logits, targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceToSequence(_Sequences):
    """The task of an encoder and a decoder, such as translation; both read sequences of the same length.

    The decoder's input is a start token followed by the targets without the last one.
    """

    def batch(self) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...]]:
        """Return tokens of encoder and decoder, and the decoder's targets, each (batch, sequence)."""
        tokens, _ = self._tokens()
        targets, _ = self._tokens()
        return {"input_ids": tokens, "decoder_input_ids": self._behind_start(targets)}, (targets,)

    def _behind_start(self, targets: torch.Tensor) -> torch.Tensor:
        start = torch.full((self.batch_size, 1), _start_token(self.config))
        return torch.cat([start, targets[:, :-1]], dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechToText(SequenceToSequence):
    """Whisper's task: from a spectrogram of fixed length to tokens (Radford et al., "Whisper", 2022, section 2.2)."""

    def batch(self) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...]]:
        """Return spectrograms (batch, bins, frames), the decoder's tokens and its targets (batch, sequence)."""
        # The second convolution halves the number of frames.
        frames = 2 * self.config.max_source_positions
        targets, _ = self._tokens()
        features = torch.randn(self.batch_size, self.config.num_mel_bins, frames)
        return {"input_features": features, "decoder_input_ids": self._behind_start(targets)}, (targets,)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionClassifier(Task):
    """The task of classifying images of ``image_size`` pixels per side; the model is built for this size."""

    reads: ClassVar[tuple[str, ...]] = ("num_channels",)

    image_size: int = DEFAULT_IMAGE_SIZE

    def __post_init__(self) -> None:
        patch = getattr(self.config, "patch_size", None)
        # Of other sizes, transformers leaves out the rest of an image, or pads it.
        if isinstance(patch, int) and self.image_size < patch:
            raise ModelReferenceError(
                f"Images of {self.image_size} pixels were asked for, but this {self.config.model_type} reads patches "
                f"of {patch} pixels; choose {patch} or more."
            )

    @classmethod
    def of(cls, config: Any, model_class: type) -> VisionClassifier:
        """Return the task with images of the configuration's size, or of `DEFAULT_IMAGE_SIZE` (224 pixels)."""
        size = getattr(config, "image_size", None)
        return cls(
            config=config, model_class=model_class, image_size=size if isinstance(size, int) else DEFAULT_IMAGE_SIZE
        )

    def build(self) -> Any:
        """Return the model with newly initialised weights, in training mode, for images of ``image_size``."""
        config = copy.deepcopy(self.config)
        if hasattr(config, "image_size"):
            config.image_size = self.image_size
        model = self.model_class(config)
        model.train()
        return model

    def batch(self) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...]]:
        """Return images (batch, channels, size, size), and as targets classes (batch,)."""
        images = torch.randn(self.batch_size, self.config.num_channels, self.image_size, self.image_size)
        return {"pixel_values": images}, (torch.randint(self.config.num_labels, (self.batch_size,)),)

    def loss(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of the samples."""
        return cross_entropy(outputs.logits, targets)


def _positions(config: Any) -> int | None:
    """The number of positions that the model has for text; None if they are relative (-1 in XLNet)."""
    given = (getattr(config, name, None) for name in ("max_target_positions", "max_position_embeddings"))
    return next((value for value in given if isinstance(value, int) and value > 0), None)


def _start_token(config: Any) -> int:
    """The token that the decoder's input begins with."""
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), 0)


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
    """Return the task for a configuration's ``data``; ``where`` names the file in messages.

    Raises ModelReferenceError if transformers is missing or refuses the configuration, or if no task suits its model.
    """
    _check(data, where)
    classes = _import_classes(where)
    with classes.quiet_offline(), _refused_by(classes.VERSION, where):
        config = classes.make_config(dict(data), where)
        task, model_class = classes.find_task(config, where)
        classes.choose_implementations(config, model_class, data, where)
        return task.of(config, model_class)


def make_huggingface(task: Task, where: str, *, fake: bool) -> tuple[Any, Any, Any]:
    """Return (module, inputs, targets) of a task. ``fake``: build the module with fake tensors, without memory.

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
