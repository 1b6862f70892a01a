"""Which sizes can be built? What several families ask of their shapes, in one place and in the same words."""

from __future__ import annotations

from meshwright.spec import ModelReferenceError


def check_heads(family: str, *, num_layers: int, width: int, num_heads: int) -> None:
    """Raise ModelReferenceError unless there is a layer and the heads share the width evenly."""
    if min(num_layers, num_heads) < 1 or width % num_heads:
        raise ModelReferenceError(
            f"A {family} of {num_layers} layers, width {width} and {num_heads} heads was described; "
            "expected at least one layer and a width that the number of heads divides."
        )


def check_length(family: str, sequence_length: int, most: int) -> None:
    """Raise ModelReferenceError for sequences that are empty or longer than ``most`` tokens."""
    if not 1 <= sequence_length <= most:
        raise ModelReferenceError(
            f"Sequences of {sequence_length} tokens were asked for, but this {family} was made for up to {most}; "
            f"choose a sequence length from 1 to {most}."
        )


def check_halvings(family: str, image_size: int, num_halvings: int) -> None:
    """Raise ModelReferenceError for images that cannot be halved that many times without a remainder."""
    if image_size < 1 or image_size % 2**num_halvings:
        raise ModelReferenceError(
            f"Images of {image_size} pixels were asked for, but this {family} halves them {num_halvings} times; "
            f"choose a multiple of {2**num_halvings} pixels."
        )
