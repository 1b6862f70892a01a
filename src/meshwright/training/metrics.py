"""Metrics of a run for other tools: TensorBoard scalars in a folder, a page for Prometheus on the loopback interface.

Both need extras, imported on use. The loss of a step may be known some steps later (asynchronous schedules); it is
written at its own step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from meshwright.spec.errors import RunError
from meshwright.spec.events import EventSink


class Watched(EventSink, Protocol):
    """A sink that is closed at the end of the run."""

    def close(self) -> None:
        """Write buffered values, and release ports."""


class TensorBoardSink:
    """Scalars ``training/loss`` and ``training/samples_per_s`` by step.

    Raises RunError without TensorBoard, or for a folder that cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra
        except ModuleNotFoundError:
            raise _missing("TensorBoard scalars", "tensorboard") from None
        try:
            self._writer: Any = SummaryWriter(str(folder))
        except OSError as error:
            raise RunError(f"{folder}: scalars cannot be written there ({error.strerror}). Choose a folder.") from None

    def progress(self, task: str, done: int, total: int) -> None:
        """Do nothing."""

    def metric(self, name: str, value: float, step: int) -> None:
        """Write a scalar."""
        self._writer.add_scalar(f"training/{name}", value, step)

    def close(self) -> None:
        """Write buffered values."""
        self._writer.close()


class PrometheusSink:
    """Gauges ``meshwright_loss``, ``meshwright_samples_per_s``, ``meshwright_step`` and ``meshwright_steps``.

    Served at ``http://127.0.0.1:port/metrics``; port 0 takes a free one. Raises RunError without the client library, or
    for a port that is taken.
    """

    def __init__(self, port: int) -> None:
        try:
            from prometheus_client import CollectorRegistry, Gauge, start_http_server  # noqa: PLC0415 - an extra
        except ModuleNotFoundError:
            raise _missing("A page for Prometheus", "metrics") from None
        self._make_gauge, self._registry = Gauge, CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        try:
            self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=self._registry)
        except OSError as error:
            raise RunError(
                f"Port {port} was given for metrics and cannot be used ({error.strerror}). Give another one, or 0 for "
                "one that is free."
            ) from None
        self.port: int = self._server.server_port

    def progress(self, task: str, done: int, total: int) -> None:
        """Set the step, and the number of steps."""
        if task == "steps":
            self._set("step", done, "Steps that are done.")
            self._set("steps", total, "Steps of the run.")

    def metric(self, name: str, value: float, step: int) -> None:  # noqa: ARG002 - Prometheus has times of its own
        """Set the newest value."""
        self._set(name, value, f"{name}, newest known value.")

    def close(self) -> None:
        """Release the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _set(self, name: str, value: float, words: str) -> None:
        if name not in self._gauges:
            self._gauges[name] = self._make_gauge(f"meshwright_{name}", words, registry=self._registry)
        self._gauges[name].set(value)


class _Several:
    def __init__(self, sinks: Sequence[EventSink]) -> None:
        self._sinks = sinks

    def progress(self, task: str, done: int, total: int) -> None:
        for sink in self._sinks:
            sink.progress(task, done, total)

    def metric(self, name: str, value: float, step: int) -> None:
        for sink in self._sinks:
            sink.metric(name, value, step)


@contextmanager
def watching(events: EventSink | None, tensorboard: Path | None, prometheus: int | None) -> Iterator[EventSink]:
    """A sink that passes values on to ``events`` and to the chosen tools, closed at the end."""
    with ExitStack() as stack:
        sinks: list[EventSink] = [events] if events is not None else []
        for make, argument in ((TensorBoardSink, tensorboard), (PrometheusSink, prometheus)):
            if argument is not None:
                sink: Watched = make(argument)  # type: ignore[arg-type]  # each has its own
                stack.callback(sink.close)
                sinks.append(sink)
        yield _Several(sinks)


def _missing(what: str, extra: str) -> RunError:
    return RunError(f"{what} needs a library that is not installed. Run pip install 'meshwright[{extra}]'.")
