"""Checks of sizes that several model families share."""

from __future__ import annotations

from meshwright.spec import ModelReferenceError


def check_heads(family: str, *, num_layers: int, width: int, num_heads: int) -> None:
    """Raise ModelReferenceError unless there is at least one layer and the number of heads divides the width."""
    if min(num_layers, num_heads) < 1 or width % num_heads:
        raise ModelReferenceError(
            f"A {family} of {num_layers} layers, width {width} and {num_heads} heads was described; "
            "expected at least one layer and a width that the number of heads divides."
        )


def check_length(family: str, sequence_length: int, most: int) -> None:
    """Raise ModelReferenceError if sequences are empty or longer than ``most`` tokens."""
    if not 1 <= sequence_length <= most:
        raise ModelReferenceError(
            f"Sequences of {sequence_length} tokens were asked for, but this {family} was made for up to {most}; "
            f"choose a sequence length from 1 to {most}."
        )


def check_halvings(family: str, image_size: int, num_halvings: int) -> None:
    """Raise ModelReferenceError unless 2^``num_halvings`` divides the size of images (pixels per side)."""
    if image_size < 1 or image_size % 2**num_halvings:
        raise ModelReferenceError(
            f"Images of {image_size} pixels were asked for, but this {family} halves them {num_halvings} times; "
            f"choose a multiple of {2**num_halvings} pixels."
        )
