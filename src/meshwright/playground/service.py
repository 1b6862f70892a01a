"""The responses of the playground by path, without HTTP: JSON, files, and one computation at a time.

GET   /  /playground.js ...      the page and its files
      /options                   what the controls offer
      /plan.json?STATE           files of a state: a plan for `meshwright run`, a trace for ui.perfetto.dev,
      /trace.json?STATE          the report as one page
      /report.html?STATE
POST  /answer                    {query, pinned, page, number} → `answer_data`
      /interval                  {query} → `interval_data`: two more simulations, so it is a separate request
      /search                    {query} → a `jobs.SearchJob` report;  /progress, /stop: {job} → the same

One request is computed at a time (`Turns`); the others wait. A page numbers its requests. When a waiting request can
start, it is dropped if its page has sent a newer one. So dragging a control causes at most two computations, not one
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

from meshwright.planner import explain_difference, explain_step_interval, predict_step_interval, simulation_document
from meshwright.planner.evaluate import StepInterval
from meshwright.planner.plan_pages import headline_facts
from meshwright.planner.plans import summarise
from meshwright.planner.rank_layouts import LayoutName
from meshwright.playground.controls import (
    AS_PLANNED,
    LIMITS,
    OFFLOAD_NAMES,
    REST_NAMES,
    Controls,
    from_query,
    scenario_of,
    to_query,
)
from meshwright.playground.jobs import RefusedError, Searches
from meshwright.playground.opened_plans import describe_given
from meshwright.playground.workbench import StateResult, Workbench
from meshwright.report import describe_scenario
from meshwright.report.page import page_html, page_script, page_style, versions
from meshwright.report.perfetto import trace_pieces
from meshwright.spec import Cluster, MeshwrightError, encode_document, format_bytes, load_cluster, shipped_kinds
from meshwright.spec.codec import dump_json
from meshwright.spec.memory import ACTIVATIONS, MEMORY_GROUPS, name_part
from meshwright.spec.plan import name_stages
from meshwright.spec.precision import Precision
from meshwright.spec.recompute import RECOMPUTE_NAMES
from meshwright.spec.schedules import SCHEDULE_NAMES
from meshwright.spec.workload import OptimizerName

Row = dict[str, Any]

NEVER_FLUSHES = "The schedule is asynchronous; the step time is that of a step while the pipeline is full."


def answer_data(answer: StateResult) -> Row:
    """Return the response for a state that has a plan.

    Its fields:

        status    "fits", "too large" (simulated, but memory does not suffice), "impossible" (no plan)
        message   what is wrong and what to change; empty if nothing is wrong
        query     the state, every value written out: the link
        figures   the headline numbers, each with its unit in the name
        document  the page document that `meshwright.report.page` draws
        carried   the parts that the state takes from the opened plan, in words
        layers    names and seconds of the layers, the cuts and the balanced cuts, for the bar that moves cuts
        pinned    figures of the pinned state, its link, and the difference in words
    """
    ranked = answer.ranked
    return {
        "status": "fits" if ranked.fits else "too large",
        "message": "" if ranked.fits else explain_excess(answer),
        "query": to_query(answer.state),
        "figures": answer_figures(answer),
        "carried": describe_given(answer.state, answer.given),
        "document": answer_document(answer, deflate=False),
        "layers": {
            "names": [layer.name for layer in answer.graph.layers],
            "seconds": answer.layer_s.tolist(),
            "cuts": [stage.start for stage in answer.plan.stages[1:]],
            "balanced": list(answer.balanced),
            "is_balanced": not answer.state.cuts,
        },
    }


def answer_figures(answer: StateResult) -> Row:
    """Return the headline figures of a state, with throughput of all devices and per device."""
    ranked, plan = answer.ranked, answer.plan
    tokens_per_s = ranked.tokens_per_s
    return {
        **headline_facts(ranked),
        "tokens_per_s": tokens_per_s,
        "tokens_per_device_per_s": None if tokens_per_s is None else tokens_per_s / plan.num_devices,
        "sequence_length": ranked.sequence_length,
        "num_devices": plan.num_devices,
    }


def interval_data(interval: StepInterval) -> Row:
    """Return the 80 % interval of the step time (seconds), and its meaning in words."""
    return {
        "status": "interval",
        "low_s": interval.low_s,
        "high_s": interval.high_s,
        "words": explain_step_interval(interval),
    }


def impossible_data(state: Controls, message: str) -> Row:
    """Return the response for a state without a plan; ``message``: what is wrong and what to change."""
    return {"status": "impossible", "message": message, "query": to_query(state)}


def pinned_data(answer: StateResult, pinned: StateResult) -> Row:
    """Return the figures of the pinned state, and its difference from the shown state (``answer``) in words."""
    return {
        "query": to_query(pinned.state),
        "words": summarise(pinned.plan),
        "figures": answer_figures(pinned),
        "difference": explain_difference(answer.ranked, pinned.ranked),
    }


def answer_document(answer: StateResult, *, deflate: bool = True) -> Row:
    """Return the document that the page draws and that a saved report contains.

    ``deflate``: compress it more, which is slower.
    """
    scenario = describe_scenario(scenario_of(answer.state))
    seen, plan = answer.seen, answer.plan
    remarks = (
        plan.sharding.describe_teams(),
        NEVER_FLUSHES if plan.is_asynchronous else "",
        f"Scenario: {scenario}. The plan was made without it." if scenario else "",
    )
    return simulation_document(
        answer.ranked,
        answer.simulation.timeline,
        seen.graph,
        seen.cluster,
        seen.cost,
        remark="\n".join(filter(None, remarks)),
        provenance={"command": "meshwright show --play", "state": to_query(answer.state), "versions": versions()},
        deflate=deflate,
    )


def explain_excess(answer: StateResult) -> str:
    """Return a message for a plan that does not fit: the fullest rank, its largest part of memory, and remedies."""
    ranked, state = answer.ranked, answer.state
    rank = ranked.fullest_rank
    changes = []
    if ranked.memory_owner in MEMORY_GROUPS[ACTIVATIONS]:
        if state.microbatch_size > 1:
            changes.append(f"microbatches smaller than {state.microbatch_size}")
        if state.schedule == "gpipe":
            changes.append("the schedule 1f1b, which holds fewer microbatches at a time")
    if state.num_stages < len(answer.graph.layers):
        changes.append("more stages, so that each holds fewer layers")
        if state.recompute == "none":
            changes.append("recompute (activation checkpointing)")
    if ranked.memory_owner == "optimizer states" and state.optimizer != "sgd":
        changes.append("an optimizer with less state")
    shares = answer.plan.workload.kind == "training" and any(len(stage.ranks) > 1 for stage in answer.plan.stages)
    if not state.zero and shares:
        changes.append("ZeRO 1 to 3, with which replicas shard states")
    if state.cuts:
        changes.append("balanced cuts")
    changes.append("devices with more memory")
    return (
        f"Does not fit: rank {rank} ({name_stages(answer.plan, rank)}) needs "
        f"{format_bytes(ranked.reserved_bytes[rank])}, {format_bytes(ranked.excess_bytes)} more than its "
        f"{format_bytes(ranked.memory_limit_bytes[rank])}; the largest part: {name_part(ranked.memory_owner)}. "
        f"Choose {', or '.join(changes)}."
    )


# An answer takes a fraction of this; the end of the process should not take longer.
CLOSING_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An HTTP response: body, content type and status; with ``file_name``, the browser saves it as a file."""

    body: bytes
    content_type: str = "application/json"
    status: int = 200
    file_name: str = ""


class Service:
    """The playground's responses by path; thread-safe. ``start``: the state that the page shows first."""

    def __init__(self, bench: Workbench, start: Controls) -> None:
        self._bench = bench
        self._start = start
        self._turns = Turns()
        self._searches = Searches(bench, self._turns.lock)
        # Intervals are computed in parallel with the answers, one at a time.
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
        """Return the response to a GET. Raises RefusedError for an unknown path."""
        asset = read_asset(path)
        if asset is not None:
            return Reply(content_type=asset[0], body=asset[1])
        if path == "/options":
            return _json(self._options())
        if path not in self._files:
            raise RefusedError(404, "This path does not exist on this server.")
        try:
            state = from_query(query)
            with self._turns.lock:
                answer = self._bench.answer(state)
            return self._files[path](answer)
        except MeshwrightError as error:
            return Reply(status=400, content_type="text/plain; charset=utf-8", body=f"{error}\n".encode())

    def post(self, path: str, body: bytes) -> Reply:
        """Return the response to a POST. Raises RefusedError for an unknown path, or if the body is not an object."""
        if path not in self._posts:
            raise RefusedError(404, "This path does not exist on this server.")
        try:
            data = json.loads(body)
        except (ValueError, RecursionError):
            raise RefusedError(400, "The body of the request is not valid JSON.") from None
        if not isinstance(data, dict):
            raise RefusedError(400, "The body of the request is not a JSON object.")
        try:
            return _json(self._posts[path](data))
        except StaleError:
            return _json({"status": "stale"})
        except MeshwrightError as error:
            return _json({"status": "impossible", "message": str(error)})

    def warm_up(self) -> None:
        """Compute the first state once, so that compiled code is loaded before the first request."""
        with self._turns.lock:
            try:
                self._bench.answer(self._start)
            except MeshwrightError:
                return

    def close(self) -> None:
        """Stop running computations, and start no others: a process must not end while compiled code runs.

        Waits some seconds for running computations.
        """
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
        raise RefusedError(400, f"The request has no valid text {key!r}; reload the page.")
    return value


def _number(data: Row, key: str) -> int:
    value = data.get(key)
    if type(value) is not int or not 0 <= value < 2**53:
        raise RefusedError(400, f"The request has no valid whole number {key!r}; reload the page.")
    return value


_HTML, _SCRIPT, _STYLE = "text/html; charset=utf-8", "text/javascript; charset=utf-8", "text/css; charset=utf-8"
# In the order of their dependencies.
SCRIPTS = ("controls.js", "cuts.js", "figures.js", "search.js", "playground.js")


@cache
def read_asset(path: str) -> tuple[str, bytes] | None:
    """Return (content type, content) of a file of the page (HTML, scripts, styles); None for any other path."""
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
    """A request is outdated: its page has sent a newer one."""


class Turns:
    """Lets one request compute at a time, and drops outdated requests (StaleError)."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._newest: OrderedDict[str, int] = OrderedDict()
        self._counting = threading.Lock()

    def close(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` seconds for the current request; later requests never start."""
        self.lock.acquire(timeout=timeout_s)

    @contextmanager
    def turn(self, page: str, number: int) -> Iterator[None]:
        """Wait until no other request computes, then enter the context.

        ``page``: identifies the page. ``number``: the number of its request. Raises StaleError if the page has sent a
        request with a higher number by then.
        """
        with self._counting:
            self._newest[page] = max(number, self._newest.get(page, number))
            self._newest.move_to_end(page)
            while len(self._newest) > _MAX_PAGES:
                self._newest.popitem(last=False)
        with self.lock:
            if self._newest.get(page, number) > number:
                raise StaleError
            yield
