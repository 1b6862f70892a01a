"""Sections of `benchmarks/rewrite.py` about graphs: the search, and the speed of what it finds.

Costs of the section ``search`` are those of datasheets, so that it gives the same figures everywhere. The section
``speed`` times whole graphs on one thread of this machine, arms alternated; onnxruntime is an arm where it is installed
(pip install onnxruntime onnx onnxscript).
"""

from __future__ import annotations

import io
import time
import tracemalloc
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from harness import Row, make_row
from rewrite_backtracking import backtrack
from rewrite_models import BLOCKS, MODELS, SOURCES, WASTE, whole

from meshwright.capture import capture_model
from meshwright.cost import CostModel
from meshwright.rewrite.fx import ReadGraph, read_captured
from meshwright.rewrite.optimize import LIMITS, rewrite_model
from meshwright.rewrite.search.call_costs import CallCosts, alternate
from meshwright.rewrite.search.graph_search import FoundGraph, GraphSpace, Grown
from meshwright.rewrite.search.ruleset import Guided, shipped_rules
from meshwright.spec import load_cluster
from meshwright.zoo import load_model

Run = Callable[[], Any]


def read(model: torch.nn.Module, batch: Any) -> Any:
    captured = capture_model(model.eval(), batch, mode="inference", verify=False)
    return read_captured(captured, batch)


def costs_on(name: str) -> CallCosts:
    cluster = load_cluster(name)
    return CallCosts(CostModel(cluster=cluster), cluster.device_kinds[0], training=False)


def peak_bytes(run: Run) -> int:
    """The most that Python holds at a time while something runs."""
    tracemalloc.start()
    run()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def searched(source: ReadGraph, rules: Guided) -> tuple[Grown, FoundGraph]:
    space = GraphSpace(source.terms, source.effects, frozen=True)
    grown = space.grow(rules, LIMITS)
    costs = costs_on("2xcpu")
    costs.estimate(space.calls())
    return grown, space.choose(costs, grown)


def search(quick: bool) -> list[Row]:
    rules = shipped_rules()
    rows = []
    for name in ("bert-base",) if quick else ("bert-base", "bert-large", "gpt2-large", "resnet50"):
        source_model = load_model(name)
        source = read(source_model.model, source_model.inputs)
        start = time.process_time()
        grown, found = searched(source, rules)
        seconds = time.process_time() - start
        label = f"{name}, {len(source.terms.needed())} terms"
        rows += [
            make_row(f"{label}: rules, costs and choice", seconds, "s", target=5.0),
            make_row(
                f"{label}: memory that it takes",
                peak_bytes(partial(searched, source, rules)) / 2**30,
                "GiB",
                target=2.0,
            ),
            make_row(f"{label}: operators in the e-graph ({grown.ended})", grown.num_nodes, "operators"),
            make_row(f"{label}: proved cheapest", float(found.proved), "of 1"),
        ]
    torch.set_num_threads(1)
    name = "bert-tiny" if quick else "bert-base"
    source_model = load_model(name, batch_size=1)
    cold = rewrite_model(source_model.model.eval(), source_model.inputs)
    without = sum(seconds for lap, seconds in cold.seconds.items() if lap != "timing")
    rows += [
        make_row(
            f"{name}, nothing timed before: capture, search, timings of operators, checks", without, "s", target=60.0
        ),
        make_row(f"{name}: difference in float64", max(each.worst for each in cold.candidates), "relative"),
    ]
    better, never = 0, 0
    graphs = {**BLOCKS, **({} if quick else WASTE)}
    differs = []
    for name, make in graphs.items():
        model, batch = make()
        source = read(model, batch)
        chosen = {}
        for cluster in ("2xcpu", "8xH100"):
            space = GraphSpace(source.terms, source.effects, frozen=True)
            grown = space.grow(rules, LIMITS)
            costs = costs_on(cluster)
            costs.estimate(space.calls())
            found = space.choose(costs, grown)
            chosen[cluster] = found.terms.nodes
            if cluster == "2xcpu":
                # As long as the search takes, and at least as many graphs as TASO's own settings pop.
                taso = backtrack(source.terms, rules, costs, frozen=True, most_popped=1000, limit_s=5 if quick else 30)
                rows.append(
                    make_row(
                        f"{name}: predicted, ours / TASO's search",
                        found.after_s,
                        "s",
                        baseline=taso.seconds,
                        ratio=found.after_s / taso.seconds,
                        target=1.0 + 1e-9,
                    )
                )
                better += found.after_s < taso.seconds * 0.95
                never += found.after_s > taso.seconds * (1 + 1e-9)
        if chosen["2xcpu"] != chosen["8xH100"]:
            differs.append(name)
    rows += [
        make_row("graphs on which TASO's search is at least 5 % dearer", better, "graphs"),
        make_row("graphs on which it is cheaper", never, "graphs", target=0),
        make_row(f"graphs whose best differs between CPU and H100 ({', '.join(differs[:3])})", len(differs), "graphs"),
    ]
    return rows


def speed(quick: bool) -> list[Row]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows: list[Row] = []
    ratios: dict[str, dict[str, list[float]]] = {"blocks": {}, "waste": {}, "models": {}}
    models = {name: partial(whole, name) for name in MODELS}
    for kind, graphs in (("blocks", BLOCKS), ("waste", WASTE), ("models", models)):
        for name in list(graphs)[: 2 if quick else None]:
            torch.manual_seed(0)
            model, batch = graphs[name]()
            found = rewrite_model(model, batch)
            arms = _arms(model, found.module, batch, compiled=kind == "blocks" and not quick)
            taken = alternate([run for pair in arms.values() for run in pair], rounds=12 if quick else 40, budget_s=60)
            typical = np.quantile(taken, 0.25, axis=0).reshape(-1, 2)
            low, high = _interval(taken)
            for i, arm in enumerate(arms):
                ratio = typical[i, 1] / typical[i, 0]
                ratios[kind].setdefault(arm, []).append(ratio)
                source = f" ({SOURCES[name]})" if name in SOURCES else ""
                rows.append(
                    make_row(
                        f"{name}, {arm}: rewritten / as it was{source}",
                        typical[i, 1],
                        "s",
                        baseline=typical[i, 0],
                        ratio=ratio,
                        spread=float(high[i] - low[i]) / 2,
                        target=1 / (1.05 if kind == "models" else 0.98),
                    )
                )
            if kind == "blocks":
                best = typical.min(axis=0)
                peer = list(arms)[int(typical[:, 0].argmin())]
                ratios[kind].setdefault("best peer", []).append(best[1] / best[0])
                rows.append(
                    make_row(
                        f"{name}: best rewritten / best peer ({peer})",
                        best[1],
                        "s",
                        baseline=best[0],
                        ratio=best[1] / best[0],
                    )
                )
            torch._dynamo.reset()
    for kind, by_arm in ratios.items():
        for arm, each in by_arm.items():
            targets = {("blocks", "eager"): 1.15, ("blocks", "best peer"): 1.08, ("models", "eager"): 1.05}
            target = 1 / targets[kind, arm] if (kind, arm) in targets else None
            mean = float(np.exp(np.mean(np.log(each))))
            rows.append(
                make_row(f"{kind}, {arm}: geometric mean of {len(each)}", mean, "ratio", ratio=mean, target=target)
            )
    fast = sum(each <= 1 / 1.5 for each in ratios["waste"].get("eager", []))
    rows.append(make_row("wasteful graphs that are 1.5 times as fast, or more", -fast, "graphs (negative)", target=-12))
    return rows


def _interval(taken: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    draws = np.random.default_rng(0).integers(len(taken), size=(200, len(taken)))
    quartiles = np.quantile(taken[draws], 0.25, axis=1).reshape(200, -1, 2)
    each = quartiles[:, :, 1] / quartiles[:, :, 0]
    return np.quantile(each, 0.025, axis=0), np.quantile(each, 0.975, axis=0)


def _arms(before: Any, after: Any, batch: Any, *, compiled: bool) -> dict[str, tuple[Run, Run]]:
    """By arm: the model as it was and the rewritten one, each as a call."""
    arms = {"eager": (_eager(before, batch), _eager(after, batch))}
    if compiled:
        arms["torch.compile"] = (_compiled(before, batch, {}), _compiled(after, batch, {}))
        freezing = {"freezing": True}
        arms["torch.compile, freezing"] = (_compiled(before, batch, freezing), _compiled(after, batch, freezing))
        if find_spec("onnxruntime") is not None:
            arms["onnxruntime"] = (_onnx(before, batch), _onnx(after, batch))
    return arms


def _eager(model: Any, batch: Any) -> Run:
    def run() -> Any:
        with torch.inference_mode():
            return model(*batch)

    return run


def _compiled(model: Any, batch: Any, options: dict[str, Any]) -> Run:
    made = torch.compile(model, options=options or None)
    with torch.no_grad():
        made(*batch)

    def run() -> Any:
        with torch.no_grad():
            return made(*batch)

    return run


def _onnx(model: Any, batch: Any) -> Run:
    import onnxruntime

    buffer = io.BytesIO()
    with torch.no_grad():
        program = torch.onnx.export(model, tuple(batch), dynamo=True, verbose=False)
    program.save(buffer)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = settings.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(buffer.getvalue(), settings, providers=["CPUExecutionProvider"])
    feeds = {given.name: tensor.numpy() for given, tensor in zip(session.get_inputs(), batch, strict=True)}
    return lambda: session.run(None, feeds)
