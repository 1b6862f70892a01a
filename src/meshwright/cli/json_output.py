"""What ``--json`` prints: one document per command, whose kind, version and keys are listed here.

The first key of a document is ``schema``: ``meshwright/KIND/VERSION``. The version grows when a key is removed or
changes its meaning; keys may be added at any time. Keys end with their units: ``_s`` seconds, ``_bytes``, ``_flops``,
``_share`` (of 1), ``_per_s``. ``docs/json.md`` is made from this table.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonDocument:
    """A kind of document: the command that prints it, the version of its keys, and what they hold.

    ``open``: the document has more keys than the listed ones; the command's page describes them.
    """

    command: str
    keys: dict[str, str]
    version: int = 1
    open: bool = False


_WORKLOAD = "model, parameters, cluster, devices, samples and tokens of a step, sequence length, precision, optimizer"
_BASIS = "how many op costs were measured, and how uncertain the others are"
_INTERVAL = "80 % interval of the step time: low, high"
_MEASURED = "whether any op cost was measured"
_TEAMS = "what a rank stands for, where ops are split"
_NODES = "bytes on hosts and drives, for states that are offloaded"
_FILE = "where the result was written, or null"
_TIMELINE = {
    "origin": "predicted or measured",
    "num_ranks": "ranks of the timeline",
    "num_steps": "steps of the timeline",
    "num_spans": "instructions of the timeline",
    "median_step_s": "median step, from a cold start",
    "slowest_step_s": "slowest step",
    "bubble_share": "share of all device time in which nothing is computed",
    "ranks": "a row per rank: busy, communication and idle seconds, peak memory",
}

OUTPUTS: dict[str, JsonDocument] = {
    "plans": JsonDocument(
        command="plan",
        version=2,
        keys={
            "workload": _WORKLOAD,
            "plans": "a row per plan, best first: layout, step and interval, tokens/s, MFU, memory, terms of the step",
            "ranks": "a row per rank of the best plan: peak, reserved and allowed bytes, parts of the peak",
            "allocation": "the moment at which the fullest rank is fullest; null where ops cannot be followed",
            "basis": _BASIS,
            "step_interval_s": _INTERVAL,
            "step_interval_measured": _MEASURED,
            "search": "method, plans covered, pruned and simulated, lower bound, Pareto front, notes",
            "shares": "with --shares: the gain over the plain plan, and what of it each choice gains",
            "teams": _TEAMS,
            "nodes": _NODES,
            "strategy": "with --method flexflow: degrees and devices of each layer, its step and that of the best plan",
            "file": "the plan that was written, or null",
            "script": "the script that starts it, or null",
            "orders": "the orders that were found, or null",
            "page": "the page that was written, or null",
        },
    ),
    "misfit": JsonDocument(
        command="plan, where nothing fits (exit code 3)",
        keys={
            "plans": "no rows",
            "nearest": "the plan that exceeds memory by least, in words",
            "ranks": "its ranks, as for plans",
            "error": "what does not fit, and the cheapest change that makes it fit",
        },
    ),
    "op-placement": JsonDocument(
        command="plan --method place",
        keys={
            "workload": _WORKLOAD,
            "ranks": "a row per rank: device, ops, busy seconds, sent bytes, peak memory",
            "duration_s": "seconds of a step",
            "one_device_s": "the same on the fastest single device, or null where none holds it",
            "basis": _BASIS,
            "file": _FILE,
        },
    ),
    "simulation": JsonDocument(
        command="simulate PLAN",
        keys={
            "plan": "the file of the plan",
            "step_time_s": "seconds of a steady step",
            "workload": _WORKLOAD,
            "contention": "how transfers share links: queued or fair",
            "teams": _TEAMS,
            "basis": _BASIS,
            "step_interval_s": _INTERVAL,
            "step_interval_measured": _MEASURED,
            **_TIMELINE,
            "steady": "a steady step: bubble, MFU, HFU, samples/s, and the seconds of each rank",
            "scenario": "what happens to the machines, and figures under it",
            "overflows": "ranks that need more memory than their devices have",
            "nodes": _NODES,
            "explanation": "critical path, its bounds, and what would make the step shorter (--explain)",
            "schedules": "a row per schedule that was compared (--against, --find-orders)",
            "exchanges": "ways to exchange gradients (--exchange)",
            "orders": "the file of orders",
            "timeline": "the file of the timeline",
            "trace": "the file of the trace",
            "page": "the page",
        },
    ),
    "op-placement-simulation": JsonDocument(
        command="simulate PLACEMENT",
        keys={
            "workload": _WORKLOAD,
            "contention": "how transfers share links: queued or fair",
            **_TIMELINE,
            "overflows": "ranks that need more memory than their devices have",
            "scenario": "what happens to the machines, and figures under it",
        },
    ),
    "sweep": JsonDocument(
        command="simulate --sweep",
        keys={
            "parameters": "what was varied",
            "cases": "a row per case",
            "out": "the table that was written",
            "plot": "the picture that was written",
        },
        open=True,
    ),
    "serving-simulation": JsonDocument(
        command="simulate DEPLOYMENT",
        keys={
            "policy": "which policy decided",
            "seconds": "simulated seconds of arrivals",
            "models": "a row per model: requests, in time, latencies, batches",
            "policies": "a row per policy that was compared (--against)",
            "fleet": "devices that were up over time, where they scale",
        },
        open=True,
    ),
    "model-placement": JsonDocument(
        command="simulate DEPLOYMENT --place",
        keys={
            "policy": "which policy decided",
            "method": "how models were placed",
            "num_devices": "devices",
            "seconds": "simulated seconds of arrivals",
            "planned_in_time_share": "share of requests in time that the placement was made for",
            "bound_in_time_share": "no placement answers more in time",
            "groups": "a row per group of devices",
            "models": "a row per model",
            "out": "where the result was written",
        },
        open=True,
    ),
    "run": JsonDocument(
        command="run",
        keys={
            "losses": "the loss of each step",
            **_TIMELINE,
            "calibration": "what the run corrected (--calibrate)",
            "losses_off": "largest relative difference from one process (--verify)",
            "compiled": "of layers that are compiled: parts, different ones, seconds, parts that ran eagerly by reason",
            "timeline": "the file of the measured timeline",
        },
        open=True,
    ),
    "dry-run": JsonDocument(
        command="run --dry",
        keys={
            "process": "which process ran",
            "processes": "processes of the plan",
            "stages": "its stages",
            "steps": "steps that were run",
            "instructions": "instructions by opcode",
            "numbers": "single numbers that were exchanged",
            "ring_messages": "messages of rings",
            "exchanges": "a row per kind of exchange: count and bytes, as predicted",
        },
    ),
    "measurements": JsonDocument(
        command="measure",
        keys={
            "device": "what was measured",
            "software": "versions",
            "date": "when",
            "conditions": "threads, processes at once",
            "num_ops": "ops in the table",
            "op_spread_share": "median spread of an op's times",
            "num_optimizers": "optimizers in the table",
            "overhead_s": "seconds that an instruction costs in addition to its ops",
            "transfers": "a row per kind of transfer: sizes, latency, bandwidth",
            "batches": "a row per model: latency over batch size",
            "left_out": "on a GPU: ops that did not run, and why",
            "num_kept": "on a GPU: ops that the table had already",
            "warnings": "on a GPU: what makes the times uncertain",
            "file": _FILE,
        },
    ),
    "device-table": JsonDocument(
        command="measure --device-table",
        keys={
            "ops": "a row per operator: rows, fastest and slowest",
            "left_out": "operators that did not run, and why",
            "warnings": "what makes the times uncertain",
            "file": _FILE,
        },
    ),
    "measured-batches": JsonDocument(
        command="measure --batches",
        keys={
            "device": "what was measured",
            "conditions": "threads, processes at once",
            "left_out_batch_sizes": "sizes that did not fit in memory",
            "batches": "a row per size",
            "latency": "the fitted line of each model",
            "file": _FILE,
        },
    ),
    "measured-links": JsonDocument(
        command="measure --links",
        keys={
            "places": "a row per op and place: latency and bandwidth",
            "interpolated": "errors between the sizes that were measured",
            "file": _FILE,
        },
    ),
    "calibration": JsonDocument(
        command="measure --calibrate",
        keys={
            "corrections": "factors by kind of work",
            "steps_fitted": "steps that the factors were fitted on",
            "steps_judged": "steps that judge them",
            "step_measured_s": "the measured step",
            "step_before_s": "the predicted step without the factors",
            "step_after_s": "the predicted step with them",
            "error_before": "its relative error",
            "error_after": "its relative error",
            "scatter": "how much measured steps differ",
            "why_kept": "why the table was left as it was, or null",
            "file": _FILE,
        },
    ),
    "imported-records": JsonDocument(
        command="measure --from",
        keys={"files": "a row per file: kind, rows, what was left out and why", "file": _FILE},
    ),
    "described-cluster": JsonDocument(
        command="measure --cluster",
        keys={"cluster": "the cluster, as its document", "remarks": "what was assumed", "file": _FILE},
    ),
    "scores": JsonDocument(
        command="validate",
        keys={
            "sets": "scores by data set; with --list, the sets",
            "runs": "with --published, a row per run: source, figure, command, prediction, error in per cent",
            "left_out": "rows of your own table that were not scored, and why; with --published, runs left out",
            "file": "the page that was written",
        },
    ),
    "graph-summary": JsonDocument(
        command="capture",
        keys={
            "model": "the reference",
            "graph_hash": "hash of the graph",
            "num_ops": "ops",
            "num_parameters": "parameters",
            "batch_size": "samples that the figures refer to",
            "layers": "a row per layer: ops, parameters, FLOPs, bytes",
            "file": _FILE,
        },
    ),
    "zoo": JsonDocument(command="show zoo", keys={"models": "a row per shipped model"}),
    "layer-costs": JsonDocument(
        command="show MODEL --cluster",
        keys={
            "model": "the model",
            "batch_size": "samples that the figures refer to",
            "precision": "types of weights, activations and gradients",
            "devices": "a row per kind of device: layers, total, optimizer",
        },
    ),
    "layer-memory": JsonDocument(
        command="show MODEL --memory",
        keys={
            "model": "the model",
            "cluster": "the cluster",
            "batch_size": "samples that the figures refer to",
            "precision": "types of weights, activations and gradients",
            "device": "the kind of device",
            "layers": "a row per layer",
            "ways": "a row per way to need less memory",
        },
    ),
    "collectives": JsonDocument(
        command="show CLUSTER --collectives",
        keys={
            "cluster": "the cluster",
            "precision": "types of what is exchanged",
            "ranks": "the ranks that take part",
            "collectives": "a row per op and size: seconds and interval",
            "orders": "the orders of ring and tree",
            "limits": "what bounds each of them",
        },
    ),
    "records": JsonDocument(
        command="show TABLE.parquet",
        keys={"file": "the table", "rows": "how many", "ops": "a row per device and op"},
    ),
    "schedule": JsonDocument(
        command="show PLAN --schedule",
        keys={
            "plan": "the plan",
            "schedule": "its schedule",
            "num_slots": "slots of the picture",
            "in_flight": "microbatches in flight, by stage",
            "timeline": "the timeline in slots, as its document",
            "drawing": "the picture that was written",
        },
    ),
    "settings": JsonDocument(
        command="show PLAN --as SYSTEM",
        keys={
            "system": "the system",
            "version": "its version",
            "file_name": "usual name of the file",
            "values": "the settings",
            "text": "the file",
            "start": "how to start",
            "fill_in": "what is left to fill in",
            "not_expressed": "what the system cannot express, and why",
        },
    ),
    "diagnosis": JsonDocument(
        command="doctor",
        keys={"num_problems": "problems found", "findings": "a row per finding, with its remedy"},
    ),
    "rewriting": JsonDocument(
        command="optimize MODEL",
        keys={
            "model": "the reference",
            "summary": "in words",
            "chosen": "the candidate that was taken, or null",
            "candidates": "a row per candidate: predicted and measured seconds, difference, rules",
            "refused": "what was refused, and why",
            "seconds": "how long it took, by part",
            "files": "what was written",
        },
    ),
    "rules": JsonDocument(
        command="optimize rules generate",
        keys={"num_rules": "rules", "num_basis": "rules of the basis"},
        open=True,
    ),
    "verdicts": JsonDocument(
        command="optimize rules verify",
        keys={"file": "where the rules are from", "counts": "rules by verdict", "rules": "a row per rule"},
    ),
    "load": JsonDocument(
        command="serve load",
        keys={
            "warnings": "what makes the figures doubtful",
            "models": "a row per model",
            "series": "a row per second",
        },
        open=True,
    ),
    "served-models": JsonDocument(command="serve models", keys={"models": "a row per model and version"}),
}


def print_json(kind: str, data: dict[str, Any]) -> None:
    """One JSON document of a kind of `OUTPUTS` on standard output."""
    print(dump_output(name_schema(kind, data)))


def name_schema(kind: str, data: dict[str, Any]) -> dict[str, Any]:
    """Return the document with its schema as the first key."""
    return {"schema": f"meshwright/{kind}/{OUTPUTS[kind].version}", **data}


def print_document(document: Any) -> None:
    """Print a document of `meshwright.spec`, encoded; it contains its schema itself."""
    print(dump_output(document))


def dump_output(data: Any) -> str:
    """Return JSON text without control characters."""
    # json.dumps does not escape this control character.
    return json.dumps(data, indent=2, allow_nan=False).replace("\x7f", "\\u007f")
