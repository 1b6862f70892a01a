"""Plan from Python and from notebooks: the results of ``meshwright plan`` as an object.

    import meshwright

    found = meshwright.plan("llama3-8b", "8xH100", tokens=2**20, zero=[0, 1])
    print(found.explain())
    found.why_not(tensor=8)
    found.save("layout")                  # plan.json and launch.sh
    found.simulate().step_time_s
    found.page("plan.html")

Options are those of the command line, with underscores; a single value may replace a list of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from meshwright.cli.main import load_verb
from meshwright.cli.model_arguments import graphs_of
from meshwright.cli.plan.plan_command import make_problem
from meshwright.cli.plan.plan_output import files_to_write, write_plan_files
from meshwright.cli.plan.plan_request import PlanRequest
from meshwright.cli.planning import as_written, given_options
from meshwright.cli.requests import OptionField, options_of
from meshwright.cli.written_pages import page_path
from meshwright.planner import (
    Limits,
    Plans,
    Problem,
    RankedPlan,
    Shares,
    explain_difference,
    find_shares,
    plans_document,
    search_plans,
)
from meshwright.planner.plans import summarise
from meshwright.report import describe_workload
from meshwright.report.page import write_page
from meshwright.simulator import Simulation, simulate_plan
from meshwright.spec import Graph, NoFeasiblePlanError, Plan, PlanError, suggest
from meshwright.spec.made_with import note_making

# What typer raises for arguments that it cannot parse; its module is private.
_USAGE: Any = typer.BadParameter.__mro__[1]
# The caller decides where results go and how they are shown; the last ones make another kind of result.
_NOT_HERE = frozenset(
    {"cluster", "out", "launch", "slurm", "html", "open_browser", "as_json", "front", "start_from", "fix"}
    | {"find_orders", "whole_backwards", "exchange", "rewrite", "shares"}
)


def plan(model: str, cluster: str, **options: Any) -> FoundPlans:
    """Search for the fastest plans of a model that fit into a cluster's memory.

    Args:
        model: The name of a shipped model, a shape file (.toml), a Hugging Face model or configuration,
            ``path/to/file.py:function``, or a captured graph.
        cluster: A cluster file (.toml) or a short form such as ``2x8xH100``.
        options: The options of ``meshwright plan``, with underscores: ``batch``, ``tokens``, ``precision``, ``tensor``,
            ``zero``, ``recompute``, ``memory_margin``, ``method``, ``deadline``, ``top``, ...

    Raises PlanError for an unknown option and for an option without effect here, NoFeasiblePlanError if no plan fits.
    """
    with _as_errors():
        request = _request(model, cluster, options)
        graph_for = graphs_of(model, request.sizes, mode="inference" if request.inference else "training")
        problem = make_problem(request, graph_for)
    plans = search_plans(
        problem, request.method, Limits(max_plans=request.top, deadline_s=request.deadline, seed=request.seed)
    )
    made_with = note_making(request.measurements, Path("plan.json"), request.software)
    ranked = tuple(as_written(item, cluster, made_with) for item in plans.ranked)
    return FoundPlans(plans=replace(plans, ranked=ranked), request=request, problem=problem, options=options)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FoundPlans:
    """The result of `plan`: the plans found, best first (``plans``), and the inputs of the search.

    ``options`` are those passed to `plan`, ``request`` holds them parsed, and ``problem`` is the search problem.
    """

    plans: Plans
    request: PlanRequest
    problem: Problem
    options: dict[str, Any]

    @property
    def best(self) -> RankedPlan:
        """The best plan with its prediction."""
        return self.plans.best

    @property
    def plan(self) -> Plan:
        """The best plan: what `save` writes and `simulate` runs."""
        return self.plans.best.plan

    @property
    def graph(self) -> Graph:
        """The graph of the best plan."""
        return self.problem.graph_for(self.plan.microbatch_size)

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict per plan, best first, with the keys that `Plans.rows` lists."""
        return self.plans.rows()

    def explain(self) -> str:
        """Return the text of `Plans.explain`: why the best plan wins, and what it needs."""
        return self.plans.explain()

    def why_not(self, other: Plan | None = None, **options: Any) -> str:
        """Return a text that compares ``other`` with the best plan: how much slower it is, and in which terms.

        Without ``other``, search again with changed options, as in ``why_not(tensor=8)``, and compare the best plan of
        that search; if none fits, the text says why. Raises PlanError if the options define another workload.
        """
        if other is not None:
            return self.plans.why_not(other)
        kept = {name: value for name, value in self.options.items() if not {name, *options} >= {"batch", "tokens"}}
        try:
            found = plan(self.request.model, self.request.cluster, **{**kept, **options})
        except NoFeasiblePlanError as error:
            return str(error)
        if found.plan.workload != self.plan.workload:
            raise PlanError(
                "The options define another workload, so step times cannot be compared. Give only options of the "
                "layout, such as tensor, zero, stages or recompute."
            )
        return f"{summarise(found.plan)}: {explain_difference(found.best, self.best)}"

    def shares(self) -> Shares:
        """Return how much each choice of the best plan gains over the plain plan (`planner.find_shares`)."""
        return find_shares(self.problem, self.plans)

    def simulate(self, place: int = 1, *, num_steps: int = 2) -> Simulation:
        """Simulate ``num_steps`` steps, from a cold start, of the plan at ``place`` of the ranking (1: the best)."""
        chosen = self._at(place).plan
        graph = self.problem.graph_for(chosen.microbatch_size)
        return simulate_plan(chosen, graph, self.problem.cluster, cost=self.problem.cost, num_steps=num_steps)

    def save(self, path: str | Path = "layout", place: int = 1) -> list[Path]:
        """Write the plan at ``place`` of the ranking (1: the best), and return the paths written.

        If ``path`` ends in .json, write the plan to that file; else write plan.json and the script that starts it,
        launch.sh, into the folder ``path``. Raises PlanError if the model is a stored graph and ``path`` a folder: a
        stored graph has no code to start.
        """
        files = files_to_write(self.request.model, Path(path), None, slurm=False)
        assert files.plan is not None
        made_with = note_making(self.request.measurements, files.plan, self.request.software)
        write_plan_files(files, replace(self._at(place).plan, made_with=made_with), self.problem.cluster)
        return [item for item in (files.plan, files.script) if item is not None and item.exists()]

    def page(self, path: str | Path = "plan.html") -> Path:
        """Write an HTML page with all plans, their timelines and memory; return its path."""
        page_path(Path(path), open_browser=False, name="plan")
        document = plans_document(self.plans, self.problem.graph_for, self.problem.cluster, self.problem.cost)
        return write_page(document, Path(path))

    def _at(self, place: int) -> RankedPlan:
        if not 1 <= place <= len(self.plans.ranked):
            raise PlanError(f"Place {place} was requested; the ranking has places 1 to {len(self.plans.ranked)}.")
        return self.plans.ranked[place - 1]

    def __repr__(self) -> str:
        return f"{describe_workload(self.plan, self.graph)}\n{self.plans.explain()}"

    def _repr_html_(self) -> str:
        return self.plans._repr_html_()


def _request(model: str | Path, cluster: str | Path, options: dict[str, Any]) -> PlanRequest:
    """The request with these options, parsed as on the command line; None means that the option is not given."""
    known = {item.field: item for item in options_of(PlanRequest).values() if item.field not in _NOT_HERE}
    for what, text in (("model", model), ("cluster", cluster)):
        if not isinstance(text, str | Path):
            raise PlanError(f"The {what} is a {type(text).__name__}; expected its name or the path of its file.")
    words = [str(model), f"--cluster={cluster}"]
    for name, value in options.items():
        if name not in known:
            raise PlanError(
                f"plan() has no option {name!r}{suggest(name, known)}. Give options of `meshwright plan`, with "
                "underscores."
            )
        words += _words_of(known[name], value)
    context = load_verb("plan").make_context("plan", words)
    request = PlanRequest(given=given_options(context), **context.params)
    if request.method == "place":
        raise PlanError(
            "plan() has no method 'place': it assigns whole layers. Call meshwright.place() to assign single ops."
        )
    request.check()
    return request


def _words_of(option: OptionField, value: Any) -> list[str]:
    """The words to type for a value on the command line; a single value may replace a list."""
    if value is None:
        return []
    if not option.takes:
        if not isinstance(value, bool):
            raise PlanError(f"{option.field} is {value!r}; expected True or False.")
        return [option.name] * value
    several = value if isinstance(value, list | tuple | range | set) else [value]
    return [f"{option.name}={item}" for item in several]


@contextmanager
def _as_errors() -> Iterator[None]:
    """Turn errors of the command line about its options into a PlanError, in Python's spelling."""
    try:
        yield
    except _USAGE as error:
        raise PlanError(_in_python(error.format_message())) from None


def _in_python(message: str) -> str:
    for option in sorted(options_of(PlanRequest).values(), key=lambda item: -len(item.name)):
        message = message.replace(option.name, option.field)
    return message
