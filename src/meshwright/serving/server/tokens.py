"""The token that a server's requests have to bring, as ``Authorization: Bearer TOKEN``: visible ASCII in one line."""

from __future__ import annotations

import hmac
from pathlib import Path

from meshwright.spec import ServingError
from meshwright.spec.files import read_regular

# Tokens are short; a file that is longer is another one.
_MOST_BYTES = 2**14


def read_token(path: Path) -> str:
    """The token in a file. Raises ServingError."""
    content = read_regular(path, _MOST_BYTES + 1, ServingError)
    token = content.decode("ascii", errors="replace").strip()
    if len(content) > _MOST_BYTES or not is_token(token):
        raise ServingError(
            f"{path}: expected a token in one line of ASCII without spaces, which requests have to bring. Write one."
        )
    return token


def is_token(text: str) -> bool:
    """May this be a token?"""
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


def is_bearer(given: bytes, token: bytes) -> bool:
    """Is what a request has as ``Authorization`` this token?"""
    scheme, _, found = given.partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(found.strip(), token)
