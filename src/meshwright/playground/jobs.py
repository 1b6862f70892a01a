"""Searches of plans in the background (`Searches`), and checks that a request comes from the playground's page.

One search runs at a time, in its own thread and with its own cost model; the page polls its progress. A stopped search
ends when the planner next reports progress: within a fraction of a second for models of some hundred layers.
`check_request` and `check_post` refuse all requests except those of a page that this server sent.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from email.message import Message
from typing import Any

from meshwright.planner import Choices, Limits, Plans, Problem, search_plans
from meshwright.playground.controls import AS_PLANNED, Controls, to_query
from meshwright.playground.page_layout import exchange_of, offload_of, sharding_of, workload_of
from meshwright.playground.workbench import Workbench
from meshwright.spec import Graph, MeshwrightError, Plan, PlaygroundError, Recompute
from meshwright.spec.recompute import name_recompute
from meshwright.spec.schedules import BASIC_SCHEDULES

# A request contains two links and some numbers.
MAX_BODY_BYTES = 64 * 1024


class RefusedError(Exception):
    """A request is refused; ``status`` is the HTTP status, the message the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


# The server listens on 127.0.0.1, but any page that is open in the user's browser can send requests there, and a
# foreign name can be made to resolve to it (DNS rebinding). Therefore
#
# - ``Host`` must be this server by its own address or ``localhost``;
# - ``Sec-Fetch-Site``, if the browser sends it, must not name another site, except for the page itself;
# - a POST must name this server as its ``Origin`` and carry JSON of a known, small length.
#
# Answers have the headers of all pages that are served (`report.page.SERVED_HEADERS`).
def check_request(headers: Message, port: int, *, is_page: bool) -> None:
    """Raise RefusedError for a request to another host name or from another site.

    ``is_page``: the request is for the page itself, to which other sites may link.
    """
    hosts = headers.get_all("Host", [])
    if len(hosts) != 1 or hosts[0].lower() not in _names(port):
        raise RefusedError(403, f"The request is for another host; expected 127.0.0.1:{port} or localhost:{port}.")
    site = headers.get("Sec-Fetch-Site", "none")
    if site not in ("same-origin", "none") and not is_page:
        raise RefusedError(403, "Requests from other sites are refused.")


def check_post(headers: Message, port: int) -> int:
    """Return the length of a POST's body, in bytes.

    Raises RefusedError if the request does not come from this server's page, is not JSON, or is too long.
    """
    origin = headers.get("Origin", "")
    if origin.lower() not in {f"http://{name}" for name in _names(port)}:
        raise RefusedError(403, "Only the page of this server may send requests.")
    if headers.get_content_type() != "application/json":
        raise RefusedError(415, "The request is not JSON; expected application/json.")
    length = headers.get("Content-Length", "")
    if headers.get("Transfer-Encoding") is not None or not (length.isascii() and length.isdigit()):
        raise RefusedError(411, "A request must state its length (Content-Length).")
    if len(length) > 9 or int(length) > MAX_BODY_BYTES:
        raise RefusedError(413, f"The request has more than {MAX_BODY_BYTES} bytes, the most that is accepted.")
    return int(length)


def _names(port: int) -> tuple[str, ...]:
    return f"127.0.0.1:{port}", f"localhost:{port}"


Row = dict[str, Any]

# Plans that are shown in the list.
MAX_PLANS = 8


class _StoppedError(Exception):
    """Unwinds a search that was stopped."""


class SearchJob:
    """One search: its thread, its progress and its result; it is also the event sink of the search."""

    def __init__(self, number: int, search: Callable[[SearchJob], Plans], show: Callable[[Plan], Controls]) -> None:
        self.number = number
        self._show = show
        self._search = search
        self._stop = threading.Event()
        self._report: Row = {"job": number, "status": "running", "task": "", "done": 0, "total": 0}
        self._thread = threading.Thread(target=self._run, name=f"search {number}", daemon=True)
        self._thread.start()

    def progress(self, task: str, done: int, total: int) -> None:
        """Store the progress of the search; end the search, by an exception, if it was stopped."""
        if self._stop.is_set():
            raise _StoppedError
        self._report = {**self._report, "task": task, "done": done, "total": total}

    def metric(self, name: str, value: float, step: int) -> None:
        """Do nothing: searches report no metrics."""

    def report(self) -> Row:
        """Return the state of the search as JSON data.

        ``status``: "running", "done", "failed" or "stopped"; ``task``, ``done`` and ``total``: the progress; ``rows``:
        the plans of a search that is done; ``message``: why a search failed.
        """
        return self._report

    def stop(self, timeout_s: float = 0.0) -> None:
        """Stop the search at its next progress report; wait up to ``timeout_s`` seconds for its end."""
        self._stop.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            found = self._search(self)
            rows = [
                {**row, "query": to_query(self._show(item.plan))}
                for row, item in zip(found.rows(), found.ranked, strict=True)
            ]
            self._report = {**self._report, "status": "done", "rows": rows, "explanation": found.explain()}
        except _StoppedError:
            self._report = {**self._report, "status": "stopped"}
        except MeshwrightError as error:
            self._report = {**self._report, "status": "failed", "message": str(error)}
        except Exception as error:
            message = (
                f"The search failed because of a defect ({type(error).__name__}: {error}). Please report it, with the "
                "page's link."
            )
            self._report = {**self._report, "status": "failed", "message": message}


class Searches:
    """Starts searches and returns their progress; one runs at a time: a new search stops the previous one.

    ``lock``: held while ``bench`` is used.
    """

    def __init__(self, bench: Workbench, lock: threading.Lock) -> None:
        self._bench = bench
        self._lock = lock
        self._numbers = itertools.count(1)
        self._job: SearchJob | None = None
        self._changing = threading.Lock()

    def start(self, state: Controls) -> Row:
        """Start a search for the best plans of a state's model, workload, cluster and scenario; return its report."""
        with self._lock:
            graph, _, cluster, cost = self._bench.prepare(state)
            given = self._bench.given_of(state)
        exchange, choices = exchange_of(state, given), _choices(state, graph, given)
        loads = self._bench.graphs_of(state)

        def graph_for(size: int) -> Graph:
            if size == state.microbatch_size:
                return graph
            with self._lock:
                return loads(size)

        def search(job: SearchJob) -> Plans:
            problem = Problem(
                graph_for=graph_for,
                cluster=cluster,
                workload=workload_of(state, graph, given),
                # Its own cost model, because cost models cache results.
                cost=replace(cost),
                choices=choices,
                exchange=exchange,
                model=state.model,
                model_sizes=self._bench.sizes_of(state),
            )
            # A method that covers the whole space would take too long for a page.
            return search_plans(problem, "slicing", Limits(max_plans=MAX_PLANS, events=job))

        def show(plan: Plan) -> Controls:
            own = graph_for(plan.microbatch_size) if plan.recompute else None
            with self._lock:
                return self._bench.open_plan(plan, state, own)

        with self._changing:
            if self._job is not None:
                self._job.stop()
            self._job = SearchJob(next(self._numbers), search, show)
            return self._job.report()

    def report(self, number: int) -> Row:
        """Return the report of search ``number``. Raises PlaygroundError if a later search replaced it."""
        return self._find(number).report()

    def stop(self, number: int) -> Row:
        """Stop search ``number`` and return its report. Raises PlaygroundError if a later search replaced it."""
        job = self._find(number)
        job.stop(timeout_s=1.0)
        return job.report()

    def close(self) -> None:
        """Stop the running search, if there is one, and wait some seconds for its end."""
        if self._job is not None:
            self._job.stop(timeout_s=5.0)

    def _find(self, number: int) -> SearchJob:
        job = self._job
        if job is None or job.number != number:
            raise PlaygroundError(
                f"Search {number} no longer exists, because a later search replaced it. Search again."
            )
        return job


def _choices(state: Controls, graph: Graph, given: Plan | None) -> Choices:
    """What the search chooses among: all slicings with the sharding, ZeRO stage, recompute and offload of the state."""
    named = () if state.schedule in (*BASIC_SCHEDULES, AS_PLANNED) else (state.schedule,)
    exchange = exchange_of(state, given)
    return Choices(
        schedules=(*BASIC_SCHEDULES, *named),
        num_chunks=(state.num_chunks,),
        shardings=(sharding_of(state, given),),
        zero=(exchange.zero,),
        shard_sizes=(exchange.shard_size,),
        recompute=(_recompute_word(state, graph, given),),
        offload=(offload_of(state),),
    )


def _recompute_word(state: Controls, graph: Graph, given: Plan | None) -> str:
    """The recompute of the state, in words that a search reads. Raises PlaygroundError if no words exist for it."""
    if state.recompute != AS_PLANNED or given is None:
        return state.recompute
    word = name_recompute(graph, Recompute(given.recompute, given.keeps))
    if not word:
        raise PlaygroundError(
            "The opened plan recomputes ranges of ops for which there is no name, and a search needs a name. Choose "
            "another value of `Recompute`, then search."
        )
    return word
