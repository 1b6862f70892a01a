"""What each path answers: the playground without HTTP.

GET   /  /playground.js ...      the page and its files
      /options                   what the controls offer
      /plan.json?STATE           files of a state: a plan for `meshwright run`, a trace for ui.perfetto.dev,
      /trace.json?STATE          the report as one page
      /report.html?STATE
POST  /answer                    {query, pinned, page, number} → `documents.answer_data`
      /interval                  {query} → `documents.interval_data`: two more simulations, so it is a separate request
      /search                    {query} → a `jobs.SearchJob` report;  /progress, /stop: {job} → the same

One request is computed at a time (`Turns`). A page numbers its requests. Later ones wait; when its turn comes, a
request of a page that has sent a newer one is dropped. So dragging a control costs at most two computations, not one
per step.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, get_args

from meshwright.planner.interval import predict_step_interval
from meshwright.planner.layouts import LayoutName
from meshwright.playground.documents import answer_data, answer_document, impossible_data, interval_data, pinned_data
from meshwright.playground.guard import RefusedError
from meshwright.playground.jobs import Searches
from meshwright.playground.state import (
    AS_PLANNED,
    LIMITS,
    OFFLOAD_NAMES,
    REST_NAMES,
    Controls,
    from_query,
    to_query,
)
from meshwright.playground.workbench import StateResult, Workbench
from meshwright.report.page import page_html, page_script, page_style
from meshwright.report.perfetto import trace_pieces
from meshwright.spec import Cluster, MeshwrightError, encode_document, load_cluster, shipped_kinds
from meshwright.spec.codec import dump_json
from meshwright.spec.plan import SCHEDULE_NAMES
from meshwright.spec.precision import Precision
from meshwright.spec.recompute_words import RECOMPUTE_NAMES
from meshwright.spec.workload import OptimizerName

Row = dict[str, Any]

# An answer takes a fraction of this; the end of the process should not take longer.
CLOSING_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Status, type and body of an answer; with ``file_name``, the browser saves it."""

    body: bytes
    content_type: str = "application/json"
    status: int = 200
    file_name: str = ""


class Service:
    """The playground's answers by path; safe to call from several threads."""

    def __init__(self, bench: Workbench, start: Controls) -> None:
        self._bench = bench
        self._start = start
        self._turns = Turns()
        self._searches = Searches(bench, self._turns.lock)
        # Intervals are computed beside the answers, one at a time.
        self._weighing = threading.Lock()
        self._files: dict[str, Callable[[StateResult], Reply]] = {
            "/plan.json": _plan_file,
            "/trace.json": _trace_file,
            "/report.html": _report_file,
        }
        self._posts: dict[str, Callable[[Row], Row]] = {
            "/answer": self._answer,
            "/interval": lambda data: self._interval(from_query(_text(data, "query"))),
            "/search": lambda data: self._searches.start(from_query(_text(data, "query"))),
            "/progress": lambda data: self._searches.report(_number(data, "job")),
            "/stop": lambda data: self._searches.stop(_number(data, "job")),
        }

    def get(self, path: str, query: str) -> Reply:
        """Answer a GET. Raises RefusedError for an unknown path."""
        asset = read_asset(path)
        if asset is not None:
            return Reply(content_type=asset[0], body=asset[1])
        if path == "/options":
            return _json(self._options())
        if path not in self._files:
            raise RefusedError(404, "This path does not exist.")
        try:
            state = from_query(query)
            with self._turns.lock:
                answer = self._bench.answer(state)
            return self._files[path](answer)
        except MeshwrightError as error:
            return Reply(status=400, content_type="text/plain; charset=utf-8", body=f"{error}\n".encode())

    def post(self, path: str, body: bytes) -> Reply:
        """Answer a POST. Raises RefusedError for an unknown path and a body that is not a JSON object."""
        if path not in self._posts:
            raise RefusedError(404, "This path does not exist.")
        try:
            data = json.loads(body)
        except (ValueError, RecursionError):
            raise RefusedError(400, "The request is not valid JSON.") from None
        if not isinstance(data, dict):
            raise RefusedError(400, "The request is not a JSON object.")
        try:
            return _json(self._posts[path](data))
        except StaleError:
            return _json({"status": "stale"})
        except MeshwrightError as error:
            return _json({"status": "impossible", "message": str(error)})

    def warm_up(self) -> None:
        """Answer the first state once, so that compiled code is loaded before the first request."""
        with self._turns.lock:
            try:
                self._bench.answer(self._start)
            except MeshwrightError:
                return

    def close(self) -> None:
        """Stop running computations and start no more: a process must not end while compiled code runs."""
        self._searches.close()
        self._weighing.acquire(timeout=CLOSING_S)
        self._turns.close(CLOSING_S)

    def _answer(self, data: Row) -> Row:
        state = from_query(_text(data, "query"))
        pinned = _text(data, "pinned") if data.get("pinned") else ""
        with self._turns.turn(_text(data, "page"), _number(data, "number")):
            begin = time.perf_counter()
            try:
                answer = self._bench.answer(state)
            except MeshwrightError as error:
                return impossible_data(state, str(error))
            reply = answer_data(answer)
            if pinned:
                reply["pinned"] = self._compare(answer, pinned)
            reply["answered_in_s"] = time.perf_counter() - begin
            return reply

    def _interval(self, state: Controls) -> Row:
        with self._weighing:
            with self._turns.lock:
                seen = self._bench.answer(state).seen
            # Its own cost model, because cost models cache results.
            return interval_data(predict_step_interval(seen.plan, seen.graph, seen.cluster, replace(seen.cost)))

    def _compare(self, answer: StateResult, pinned: str) -> Row:
        # An error in the pinned state must not keep the page from showing other states.
        try:
            return pinned_data(answer, self._bench.answer(from_query(pinned)))
        except MeshwrightError as error:
            return {"query": pinned, "message": str(error)}

    def _options(self) -> Row:
        return {
            "start": to_query(self._start),
            "models": list(self._bench.models),
            "kinds": [
                *(_kind_row(name, load_cluster(name)) for name in shipped_kinds()),
                *(_file_row(name, cluster) for name, cluster in self._bench.clusters.items()),
            ],
            "schedules": list(SCHEDULE_NAMES),
            "layouts": list(get_args(LayoutName)),
            "recomputes": list(RECOMPUTE_NAMES),
            "offloads": list(OFFLOAD_NAMES),
            "rests": [name for name in REST_NAMES if name != AS_PLANNED],
            "precisions": list(get_args(Precision)),
            "optimizers": list(get_args(OptimizerName)),
            "limits": LIMITS,
        }


def _kind_row(name: str, cluster: Cluster) -> Row:
    return {
        "name": name,
        "memory_bytes": cluster.device_kinds[0].memory_bytes,
        "num_nics": cluster.nodes[0].num_nics,
        "fixed": None,
    }


def _file_row(name: str, cluster: Cluster) -> Row:
    size = {"nodes": len(cluster.nodes), "devices": max(node.num_devices for node in cluster.nodes)}
    return {**_kind_row(name, cluster), "fixed": size}


def _plan_file(answer: StateResult) -> Reply:
    return Reply(body=dump_json(encode_document(answer.plan)).encode(), file_name="plan.json")


def _trace_file(answer: StateResult) -> Reply:
    return Reply(body=b"".join(trace_pieces([answer.simulation.timeline])), file_name="trace.json")


def _report_file(answer: StateResult) -> Reply:
    text = page_html(answer_document(answer))
    return Reply(body=text.encode(), content_type="text/html; charset=utf-8", file_name="report.html")


def _json(data: Mapping[str, Any]) -> Reply:
    return Reply(body=json.dumps(data, allow_nan=False, separators=(",", ":")).encode())


def _text(data: Row, key: str) -> str:
    value = data.get(key)
    if not isinstance(value, str) or len(value) > 10_000:
        raise RefusedError(400, f"A request without a text {key!r} was sent; reload the page.")
    return value


def _number(data: Row, key: str) -> int:
    value = data.get(key)
    if type(value) is not int or not 0 <= value < 2**53:
        raise RefusedError(400, f"A request without a whole number {key!r} was sent; reload the page.")
    return value


_HTML, _SCRIPT, _STYLE = "text/html; charset=utf-8", "text/javascript; charset=utf-8", "text/css; charset=utf-8"
# In the order of their dependencies.
SCRIPTS = ("controls.js", "cuts.js", "figures.js", "search.js", "playground.js")


@cache
def read_asset(path: str) -> tuple[str, bytes] | None:
    """Type and content of a file of the page; None for any other path."""
    match path:
        case "/":
            return _HTML, _read("playground.html").encode()
        case "/playground.css":
            return _STYLE, _read("playground.css").encode()
        case "/playground.js":
            return _SCRIPT, "\n".join(_read(name) for name in SCRIPTS).encode()
        case "/views.css":
            return _STYLE, page_style().encode()
        case "/views.js":
            return _SCRIPT, page_script().encode()
        case _:
            return None


def _read(name: str) -> str:
    return (resources.files("meshwright.playground") / name).read_text(encoding="utf-8")


# Pages whose newest number is remembered; requests of a forgotten page are never dropped.
_MAX_PAGES = 256


class StaleError(Exception):
    """The page has sent a newer request."""


class Turns:
    """Grants turns in the order of `threading.Lock`; raises StaleError for outdated requests."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._newest: OrderedDict[str, int] = OrderedDict()
        self._counting = threading.Lock()

    def close(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` seconds for the current request; later requests are refused."""
        self.lock.acquire(timeout=timeout_s)

    @contextmanager
    def turn(self, page: str, number: int) -> Iterator[None]:
        """Wait for the turn of a page's request; raises StaleError if a newer one is known by then."""
        with self._counting:
            self._newest[page] = max(number, self._newest.get(page, number))
            self._newest.move_to_end(page)
            while len(self._newest) > _MAX_PAGES:
                self._newest.popitem(last=False)
        with self.lock:
            if self._newest.get(page, number) > number:
                raise StaleError
            yield
