"""What a Hugging Face model is trained on: a synthetic batch and a loss for each task.

A task is to such a model what a shape is to a model of the zoo: sizes that `replace` changes, a batch, a loss, and
`build`. Losses are cross-entropies of the output's ``logits``, over all tokens for text, over the classes otherwise;
they are computed outside of the module, in its own precision. What routers of experts add to it (``aux_loss``) is in it
where the configuration says ``output_router_logits``, at its ``router_aux_loss_coef``, as transformers adds it. Source
of the rules per task: the documentation of the classes in transformers 5, and the papers named below.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from meshwright.spec import ModelReferenceError
from meshwright.zoo.batches import cross_entropy, random_tokens, token_cross_entropy

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model class with its configuration; subclasses say what its batches look like, and what they read of it."""

    reads: ClassVar[tuple[str, ...]] = ()

    config: Any
    model_class: type
    batch_size: int = 4

    @classmethod
    def of(cls, config: Any, model_class: type) -> Task:
        """The task in the configuration's own sizes."""
        return cls(config=config, model_class=model_class)

    def build(self) -> Any:
        """The model with fresh weights, in training mode, in torch's default dtype."""
        model = self.model_class(copy.deepcopy(self.config))
        model.train()
        return model

    def batch(self) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...]]:
        """Keyword arguments of the model, and the targets of the loss."""
        raise NotImplementedError

    def loss(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of all tokens."""
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
    """Predict the next token."""

    def batch(self) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...]]:
        """Tokens (batch, sequence), and the same moved by one."""
        tokens, targets = self._tokens()
        return {"input_ids": tokens}, (targets,)

    def loss(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of all tokens; with the routers' loss where the configuration has it made."""
        found = token_cross_entropy(outputs.logits, targets)
        routers = getattr(outputs, "aux_loss", None) if getattr(self.config, "output_router_logits", False) else None
        return found if routers is None else found + self.config.router_aux_loss_coef * routers


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedLanguageModel(_Sequences):
    """Predict 15 % of the tokens from the others: the same number in every sample, so that any batch has a loss."""

    def batch(self) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...]]:
        """Tokens (batch, sequence), and what stands at the masked places, `IGNORED` elsewhere."""
        tokens, _ = self._tokens()
        num_masked = max(1, round(MASKED_SHARE * self.sequence_length))
        masked = torch.rand(tokens.shape).argsort(dim=1) < num_masked
        # The token at a masked place is drawn anew, as in one of ten cases of the source; configurations name no mask.
        drawn = torch.randint(self.config.vocab_size, tokens.shape)
        return {"input_ids": torch.where(masked, drawn, tokens)}, (torch.where(masked, tokens, IGNORED),)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceClassifier(_Sequences):
    """One class per sequence of tokens."""

    def batch(self) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...]]:
        """Tokens (batch, sequence) and classes (batch,)."""
        return {"input_ids": self._tokens()[0]}, (torch.randint(self.config.num_labels, (self.batch_size,)),)

    def loss(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of the samples."""
        return cross_entropy(outputs.logits, targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceToSequence(_Sequences):
    """Encoder and decoder read sequences of one length; the decoder reads its targets, moved behind a start token."""

    def batch(self) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...]]:
        """Tokens and the decoder's tokens (batch, sequence), and the decoder's targets."""
        tokens, _ = self._tokens()
        targets, _ = self._tokens()
        return {"input_ids": tokens, "decoder_input_ids": self._behind_start(targets)}, (targets,)

    def _behind_start(self, targets: torch.Tensor) -> torch.Tensor:
        start = torch.full((self.batch_size, 1), _start_token(self.config))
        return torch.cat([start, targets[:, :-1]], dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechToText(SequenceToSequence):
    """Whisper's task: a spectrogram of fixed length in, tokens out (Radford et al., "Whisper", 2022, section 2.2)."""

    def batch(self) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...]]:
        """Spectrogram (batch, bins, frames), the decoder's tokens (batch, sequence), and the targets."""
        # The second convolution halves the number of frames.
        frames = 2 * self.config.max_source_positions
        targets, _ = self._tokens()
        features = torch.randn(self.batch_size, self.config.num_mel_bins, frames)
        return {"input_features": features, "decoder_input_ids": self._behind_start(targets)}, (targets,)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionClassifier(Task):
    """One class per image; a model whose positions depend on the size of the images is built for the size asked for."""

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
        """The task with images of the configuration's size, or of `DEFAULT_IMAGE_SIZE`."""
        size = getattr(config, "image_size", None)
        return cls(
            config=config, model_class=model_class, image_size=size if isinstance(size, int) else DEFAULT_IMAGE_SIZE
        )

    def build(self) -> Any:
        """The model with fresh weights, in training mode, for images of this size."""
        config = copy.deepcopy(self.config)
        if hasattr(config, "image_size"):
            config.image_size = self.image_size
        model = self.model_class(config)
        model.train()
        return model

    def batch(self) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...]]:
        """Images (batch, channels, size, size) and classes (batch,)."""
        images = torch.randn(self.batch_size, self.config.num_channels, self.image_size, self.image_size)
        return {"pixel_values": images}, (torch.randint(self.config.num_labels, (self.batch_size,)),)

    def loss(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of the samples."""
        return cross_entropy(outputs.logits, targets)


def _positions(config: Any) -> int | None:
    """How many positions the model has for text; None where they are relative (XLNet says -1)."""
    given = (getattr(config, name, None) for name in ("max_target_positions", "max_position_embeddings"))
    return next((value for value in given if isinstance(value, int) and value > 0), None)


def _start_token(config: Any) -> int:
    """The token that the decoder's input begins with."""
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), 0)
