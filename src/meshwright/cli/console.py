r"""Output for consoles whose encoding lacks some characters: these are replaced by ASCII characters.

A Windows console may use cp1252, a POSIX one without a locale ASCII. Standard output is strict in both, so that a
single arrow in a table would end in a traceback. Every replacement is one character, so that columns stay aligned.

Names come from untrusted documents. Characters that move the cursor, set the title or change the direction of writing
would alter the rest of the screen (CVE-2021-42574 describes the latter); they are printed as escapes, ``\u202e``.
"""

from __future__ import annotations

import codecs
import io
import sys
import unicodedata
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

_HANDLER = "meshwright-plain"

_STAND_INS = {
    "×": "x",
    "→": ">",
    "←": "<",
    "↑": "^",
    "↓": "v",
    "−": "-",
    "–": "-",
    "—": "-",
    "…": ".",
    "·": ".",
    "•": "*",
    "µ": "u",
    "≤": "<",
    "≥": ">",
    "≈": "~",
    "\u2018": "'",
    "\u2019": "'",
    "“": '"',
    "”": '"',
    "█": "#",
    "▓": "#",
    "▒": "=",
    "░": ".",
    "✓": "+",
    "✗": "x",
}


# Controls, formats (directions, joiners, tags), surrogates, separators of lines and paragraphs.
_CONTROLS = ("Cc", "Cf", "Cs", "Zl", "Zp")


class PlainConsole(Console):
    """Prints control characters of texts as escapes."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a string as text, escaped before its width is measured, so that columns fit what is printed."""
        return super().render_str(escape_controls(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of other renderables, such as texts that are already styled, escaped."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else escape_controls(segment.text)
            yield segment if text == segment.text else segment._replace(text=text)


def escape_controls(text: str) -> str:
    r"""Return the text with its control characters as ``\x1b`` or ``\u202e``, except line ends and tabs."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_escape, text))


def _escape(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in _CONTROLS:
        return character
    return character.encode("unicode_escape").decode()


def accept_any_character() -> None:
    """Make standard output and error replace each character that their encoding lacks."""
    codecs.register_error(_HANDLER, _write_stand_ins)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)


def _write_stand_ins(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_stand_in, error.object[error.start : error.end])), error.end


def _stand_in(character: str) -> str:
    """Return one ASCII character: a listed replacement, a letter without its accents, or a question mark."""
    if character in _STAND_INS:
        return _STAND_INS[character]
    if "\u2500" <= character <= "\u257f":  # box drawing
        return "|" if character in "│┃║╎╏" else "-"
    plain = unicodedata.normalize("NFKD", character)[:1]
    return plain if plain.isascii() and plain.isprintable() else "?"
