"""The token that a server's requests have to bring."""

from __future__ import annotations

from pathlib import Path

from meshwright.spec import ServingError


def read_token(path: Path) -> str:
    """The token in a file. Raises ServingError."""
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        token = ""
    if not token or not token.isprintable():
        raise ServingError(f"{path}: expected a token in one line of ASCII, which requests have to bring. Write one.")
    return token
