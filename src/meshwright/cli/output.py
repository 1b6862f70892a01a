"""Output of the commands other than JSON: tables on standard output, progress and errors on standard error.

Characters that a console cannot encode are replaced (`accept_any_character`); control characters are escaped
(`escape_controls`).
"""

from __future__ import annotations

import codecs
import io
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
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
    """A rich console that prints control characters as escapes."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a string as text, escaped before its width is measured, so that columns fit what is printed."""
        return super().render_str(escape_controls(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of a renderable, such as a styled text, with control characters escaped."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else escape_controls(segment.text)
            yield segment if text == segment.text else segment._replace(text=text)


def escape_controls(text: str) -> str:
    r"""Return the text with its control characters as ``\x1b`` or ``\u202e``, except line ends and tabs.

    Names come from untrusted documents. Characters that move the cursor, set the title or change the direction of
    writing (CVE-2021-42574) would alter the rest of the screen.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_escape, text))


def _escape(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in _CONTROLS:
        return character
    return character.encode("unicode_escape").decode()


# A Windows console may use cp1252, a POSIX one without a locale ASCII. Standard output is strict in both, so that a
# single arrow in a table would end in a traceback. Every replacement is one character, so that columns stay aligned.
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


def print_file(text: str) -> None:
    """Print the text of a file: unchanged into a file or pipe, without control characters on a terminal."""
    print(escape_controls(text) if sys.stdout.isatty() else text, end="", flush=True)


def print_tables(*renderables: Any) -> None:
    """Print rich renderables (or strings) on standard output."""
    console = PlainConsole(soft_wrap=False)
    for item in renderables:
        console.print(item, crop=False)


def grid_width(num_ranks: int) -> int:
    """Return the columns for the time axis of a drawn schedule: those beside the names of the ranks; at least 20."""
    return max(20, PlainConsole().width - len(f"rank {num_ranks - 1} "))


def report_error(message: str) -> None:
    """Print an error message as one paragraph on standard error."""
    console = PlainConsole(stderr=True, soft_wrap=True, highlight=False)
    console.print("[bold red]error:[/] ", end="")
    console.print(message, markup=False)


def open_address(url: str) -> None:
    """Open an address in the user's browser; print a note if there is no browser."""
    import webbrowser

    try:
        opened = webbrowser.open(url)
    except webbrowser.Error:
        opened = False
    if not opened:
        note(f"No browser could be opened here. Open {url} yourself.")


def note(message: str) -> None:
    """Print a remark on standard error, so that standard output stays free of remarks."""
    PlainConsole(stderr=True, soft_wrap=True, highlight=False).print(message, markup=False, style="dim")


class TerminalSink:
    """An event sink that draws a progress bar on a terminal, and nothing elsewhere."""

    def __init__(self) -> None:
        self._console = PlainConsole(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[metrics]}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._metrics: dict[str, float] = {}

    def __enter__(self) -> TerminalSink:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def progress(self, task: str, done: int, total: int) -> None:
        """Set the bar of a task to ``done`` of ``total``; its first call adds the bar."""
        if task not in self._tasks:
            self._tasks[task] = self._progress.add_task(task, total=total, metrics="")
        text = "  ".join(f"{name} {value:.4g}" for name, value in self._metrics.items())
        self._progress.update(self._tasks[task], completed=done, total=total, metrics=text)

    def metric(self, name: str, value: float, step: int) -> None:  # noqa: ARG002 - the protocol's signature
        """Store a number that bars show from their next update on."""
        self._metrics[name] = value


@contextmanager
def terminal_sink(quiet: bool) -> Iterator[TerminalSink | None]:
    """Yield a sink that draws progress on the terminal; None if ``quiet`` or if standard error is not a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    with TerminalSink() as sink:
        yield sink
