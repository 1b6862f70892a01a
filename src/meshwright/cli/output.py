"""What verbs print beside JSON: tables on standard output, progress and errors on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from meshwright.cli.console import PlainConsole, escape_controls


def print_file(text: str) -> None:
    """Print the text of a file: unchanged into a file or pipe, without control characters on a terminal."""
    print(escape_controls(text) if sys.stdout.isatty() else text, end="", flush=True)


def print_tables(*renderables: Any) -> None:
    """Rich renderables (or strings) on standard output."""
    console = PlainConsole(soft_wrap=False)
    for item in renderables:
        console.print(item, crop=False)


def grid_width(num_ranks: int) -> int:
    """Columns of a schedule's picture that fit beside the names of the ranks."""
    return max(20, PlainConsole().width - len(f"rank {num_ranks - 1} "))


def report_error(message: str) -> None:
    """One paragraph on standard error."""
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
    """A remark on standard error, so that standard output stays clean."""
    PlainConsole(stderr=True, soft_wrap=True, highlight=False).print(message, markup=False, style="dim")


class TerminalSink:
    """An event sink that draws a bar on a terminal and stays quiet elsewhere."""

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
        """Move the bar of a task."""
        if task not in self._tasks:
            self._tasks[task] = self._progress.add_task(task, total=total, metrics="")
        text = "  ".join(f"{name} {value:.4g}" for name, value in self._metrics.items())
        self._progress.update(self._tasks[task], completed=done, total=total, metrics=text)

    def metric(self, name: str, value: float, step: int) -> None:  # noqa: ARG002 - the protocol's signature
        """Remember a number for the bar."""
        self._metrics[name] = value


@contextmanager
def terminal_sink(quiet: bool) -> Iterator[TerminalSink | None]:
    """Return a sink for a verb; None if the output is for machines."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    with TerminalSink() as sink:
        yield sink
