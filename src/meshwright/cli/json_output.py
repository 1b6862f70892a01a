"""The documents that ``--json`` prints, one per command: `OUTPUTS` lists their kinds, versions and keys.

The first key of a document is ``schema``: ``meshwright/KIND/VERSION``. The version grows when a key is removed or
changes its meaning; keys may be added at any time. Keys end with their units: ``_s`` seconds, ``_bytes``, ``_flops``,
``_share`` (of 1), ``_per_s``. ``docs/json.md`` is generated from `OUTPUTS`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonDocument:
    """A kind of document: the command that prints it, the version of its keys, and the meaning of each key.

    ``open``: the document has more keys than ``keys`` lists; the command's page describes the others.
    """

    command: str
    keys: dict[str, str]
    version: int = 1
    open: bool = False


_WORKLOAD = "model, parameters, cluster, devices, samples and tokens of a step, sequence length, precision, optimizer"
_BASIS = "in words: how many op costs were measured, and how uncertain the others are"
_INTERVAL = "80 % interval of the step time: its low and its high end"
_MEASURED = "false if every op cost is a datasheet roofline"
_TEAMS = "in words: the devices that each rank stands for; only if ops are split over devices"
_NODES = "a row per node: bytes in host memory and on drives; only if the plan offloads states"
_FILE = "path of the written result, or null"
_TIMELINE = {
    "origin": "predicted or measured",
    "num_ranks": "number of ranks in the timeline",
    "num_steps": "number of steps in the timeline",
    "num_spans": "number of instructions in the timeline",
    "median_step_s": "median seconds of a step, the first one from a cold start included",
    "slowest_step_s": "seconds of the slowest step",
    "bubble_share": "share of the time of all devices in which they compute nothing",
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
            "allocation": "bytes in use at the peak of the rank with most memory, by owner; null if not computed",
            "basis": _BASIS,
            "step_interval_s": _INTERVAL,
            "step_interval_measured": _MEASURED,
            "search": "method, plans covered, pruned and simulated, lower bound, Pareto front, notes",
            "shares": "with --shares: seconds gained over the plain plan, and each choice's share in this gain",
            "teams": _TEAMS,
            "nodes": _NODES,
            "strategy": "with --method flexflow: degrees and devices of each layer, its step and that of the best plan",
            "file": "path of the written plan, or null",
            "script": "path of the script that starts the plan, or null",
            "orders": "path of the found orders (--find-orders), or null",
            "page": "path of the written page (--html), or null",
        },
    ),
    "misfit": JsonDocument(
        command="plan, where nothing fits (exit code 3)",
        keys={
            "plans": "an empty list",
            "nearest": "in words: the plan that exceeds its devices' memory by least; null with --method place",
            "ranks": "a row per rank of that plan, with the same keys as in meshwright/plans",
            "error": "what does not fit, and the cheapest change that makes it fit",
        },
    ),
    "op-placement": JsonDocument(
        command="plan --method place",
        keys={
            "workload": _WORKLOAD,
            "ranks": "a row per rank: device, ops, busy seconds, sent bytes, peak memory",
            "duration_s": "seconds of a step",
            "one_device_s": "seconds of a step on the fastest single device; null if the model fits on none",
            "basis": _BASIS,
            "file": _FILE,
        },
    ),
    "simulation": JsonDocument(
        command="simulate PLAN",
        keys={
            "plan": "path of the plan",
            "step_time_s": "seconds of a steady step",
            "workload": _WORKLOAD,
            "contention": "how transfers share links: queued or fair",
            "teams": _TEAMS,
            "basis": _BASIS,
            "step_interval_s": _INTERVAL,
            "step_interval_measured": _MEASURED,
            **_TIMELINE,
            "steady": "a steady step: bubble, MFU, HFU, samples/s, and the seconds of each rank",
            "scenario": "with --scenario: its effects on the machines in words, and the figures that it changes",
            "overflows": "a row per rank that needs more memory than its device has; only if there are any",
            "nodes": _NODES,
            "explanation": "with --explain: the critical path, and the changes that would make the step shorter",
            "schedules": "a row per compared schedule (--against, --find-orders)",
            "exchanges": "with --exchange: a row per method of gradient reduction, and bounds",
            "orders": "path of the found orders (--find-orders)",
            "timeline": "path of the timeline (--out)",
            "trace": "path of the trace (--trace)",
            "page": "path of the page (--html)",
        },
    ),
    "op-placement-simulation": JsonDocument(
        command="simulate PLACEMENT",
        keys={
            "workload": _WORKLOAD,
            "contention": "how transfers share links: queued or fair",
            **_TIMELINE,
            "overflows": "a row per rank that needs more memory than its device has; only if there are any",
            "scenario": "with --scenario: its effects on the machines in words, and the figures that it changes",
        },
    ),
    "sweep": JsonDocument(
        command="simulate --sweep",
        keys={
            "parameters": "names of the varied parameters",
            "cases": "a row per combination of values: the values and the resulting figures",
            "out": "path of the written table (.csv)",
            "plot": "path of the written plot (.svg)",
        },
        open=True,
    ),
    "serving-simulation": JsonDocument(
        command="simulate DEPLOYMENT",
        keys={
            "policy": "the simulated policy",
            "seconds": "simulated seconds of arrivals",
            "models": "a row per model: requests, share answered in time, latencies, batch sizes",
            "policies": "a row per compared policy (--against)",
            "fleet": "number of running devices over time; only if the deployment starts and stops devices",
        },
        open=True,
    ),
    "model-placement": JsonDocument(
        command="simulate DEPLOYMENT --place",
        keys={
            "policy": "the simulated policy",
            "method": "the method that placed the models on devices",
            "num_devices": "number of devices",
            "seconds": "simulated seconds of arrivals",
            "planned_in_time_share": "share of requests answered in time in the simulations of the placement method",
            "bound_in_time_share": "upper bound of the share answered in time, over all placements",
            "groups": "a row per group of devices: devices, models, busy share",
            "models": "a row per model: requests, share answered in time, latencies, batch sizes",
            "out": "path of the written deployment",
        },
        open=True,
    ),
    "run": JsonDocument(
        command="run",
        keys={
            "losses": "the loss of each step",
            **_TIMELINE,
            "calibration": "with --calibrate: the corrections of the measurement table",
            "losses_off": "with --check: largest relative difference from the losses of one process",
            "gradients": "under an exchange policy: number of gradients that it applied, dropped and abandoned",
            "decisions": "under an exchange policy: path of the log of its decisions",
            "compiled": "compiled layers: parts, different parts, seconds of compilation, eager parts by reason",
            "timeline": "path of the measured timeline",
        },
        open=True,
    ),
    "dry-run": JsonDocument(
        command="run --dry",
        keys={
            "process": "number of the process that ran",
            "processes": "number of processes of the plan",
            "stages": "stages of the process that ran",
            "steps": "number of steps that were run",
            "instructions": "number of instructions by opcode",
            "numbers": "number of exchanges of a single number, such as a loss",
            "ring_messages": "number of messages in rings (context parallelism)",
            "exchanges": "a row per kind of exchange: count and bytes, as predicted",
        },
    ),
    "measurements": JsonDocument(
        command="measure",
        keys={
            "device": "name of the measured device",
            "software": "versions of torch and other software",
            "date": "date of the measurement",
            "conditions": "number of threads, and of processes that measured at the same time",
            "num_ops": "number of ops in the table",
            "op_spread_share": "median over the ops of the relative spread of an op's times",
            "num_optimizers": "number of optimizers in the table",
            "overhead_s": "seconds that an instruction takes in addition to its ops",
            "transfers": "a row per kind of transfer: sizes, latency, bandwidth",
            "batches": "a row per model: the line fitted to its latency over batch size",
            "left_out": "on a GPU: ops that could not be timed, with the reasons",
            "num_kept": "on a GPU: number of ops that the table already had",
            "warnings": "on a GPU: conditions that make the times uncertain",
            "file": _FILE,
        },
    ),
    "device-table": JsonDocument(
        command="measure --device-table",
        keys={
            "ops": "a row per operator: number of rows, fastest and slowest seconds",
            "left_out": "operators that could not be timed, with the reasons",
            "warnings": "conditions that make the times uncertain",
            "file": _FILE,
        },
    ),
    "measured-batches": JsonDocument(
        command="measure --batches",
        keys={
            "device": "name of the measured device",
            "conditions": "number of threads, and of processes that measured at the same time",
            "left_out_batch_sizes": "batch sizes that did not fit in memory",
            "batches": "a row per batch size: seconds and samples per second",
            "latency": "a row per model: the line fitted to its latency over batch size",
            "file": _FILE,
        },
    ),
    "measured-links": JsonDocument(
        command="measure --links",
        keys={
            "places": "a row per collective and group (ranks, concurrent groups, stride): latency and bandwidth",
            "interpolated": "80 % range of measured / interpolated seconds, for small and for large sizes",
            "file": _FILE,
        },
    ),
    "emulated-measurements": JsonDocument(
        command="measure --emulate",
        keys={
            "ops": "a row per op, optimizer or overhead: number of rows, fastest and slowest seconds",
            "places": "a row per collective and group (ranks, concurrent groups, stride): latency and bandwidth",
            "file": _FILE,
        },
    ),
    "calibration": JsonDocument(
        command="measure --calibrate",
        keys={
            "corrections": "factors by kind of work",
            "steps_fitted": "number of steps that the factors were fitted to",
            "steps_judged": "number of other steps that the factors were tested on",
            "step_measured_s": "median seconds of the tested steps",
            "step_before_s": "predicted seconds of a step without the factors",
            "step_after_s": "predicted seconds of a step with the factors",
            "error_before": "relative error of the prediction without the factors",
            "error_after": "relative error of the prediction with the factors",
            "scatter": "relative standard error of the median of the tested steps",
            "why_kept": "the reason why the table was not changed, or null",
            "file": _FILE,
        },
    ),
    "imported-records": JsonDocument(
        command="measure --from",
        keys={"files": "a row per file: kind, rows per op, and number of rows left out by reason", "file": _FILE},
    ),
    "described-cluster": JsonDocument(
        command="measure --cluster",
        keys={"cluster": "the cluster, as its document", "remarks": "assumptions of the description", "file": _FILE},
    ),
    "scores": JsonDocument(
        command="validate",
        keys={
            "sets": "scores by data set; with --list, a row per data set",
            "runs": "with --published, a row per run: source, figure, command, prediction, error in per cent",
            "left_out": "rows of your own table (with --published: runs) that were not scored, with the reasons",
            "file": "path of the written page",
        },
    ),
    "graph-summary": JsonDocument(
        command="capture",
        keys={
            "model": "the model as it was given",
            "graph_hash": "hash of the graph",
            "num_ops": "number of ops",
            "num_parameters": "number of parameters",
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
            "devices": "a row per kind of device: seconds of each layer, of all layers, of the optimizer step",
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
            "layers": "a row per layer: bytes kept for the backward, by recompute",
            "ways": "a row per combination of ZeRO, recompute and offload: bytes",
        },
    ),
    "collectives": JsonDocument(
        command="show CLUSTER --collectives",
        keys={
            "cluster": "the cluster",
            "precision": "types of the exchanged tensors",
            "ranks": "the ranks that take part",
            "collectives": "a row per collective and size: seconds and 80 % interval",
            "orders": "the ring as given, the best ring and the best tree: order of the ranks, slowest link",
            "limits": "across nodes: seconds of an all-reduce with spare machines as parameter servers",
        },
    ),
    "records": JsonDocument(
        command="show TABLE.parquet",
        keys={"file": "the table", "rows": "number of rows", "ops": "a row per device and op"},
    ),
    "schedule": JsonDocument(
        command="show PLAN --schedule",
        keys={
            "plan": "the plan",
            "schedule": "its schedule",
            "num_slots": "length of the schedule in slots; a forward takes 1 slot, a backward 2",
            "in_flight": "most microbatches in flight, by stage",
            "timeline": "the timeline in slots, as its document",
            "drawing": "path of the written drawing (.svg)",
        },
    ),
    "settings": JsonDocument(
        command="show PLAN --as SYSTEM",
        keys={
            "system": "the other system",
            "version": "version of the other system",
            "file_name": "usual name of the settings file",
            "values": "the settings, by name",
            "text": "content of the settings file",
            "start": "command that uses the file",
            "fill_in": "settings that the user has to fill in",
            "not_expressed": "choices of the plan that the system cannot express, with the reasons",
        },
    ),
    "diagnosis": JsonDocument(
        command="doctor",
        keys={"num_problems": "number of problems found", "findings": "a row per finding, with its remedy"},
    ),
    "rewriting": JsonDocument(
        command="optimize MODEL",
        keys={
            "model": "the model as it was given",
            "summary": "the result in words",
            "chosen": "name of the chosen rewritten graph; null if the model stays as it is",
            "candidates": "a row per rewritten graph: predicted seconds, speed-up, difference of outputs, rules",
            "refused": "rewritten graphs whose outputs differ from those of the model, with the difference",
            "seconds": "seconds that the command took, by phase",
            "files": "paths of the written files",
        },
    ),
    "rules": JsonDocument(
        command="optimize rules generate",
        keys={"num_rules": "number of rules", "num_basis": "number of rules from which all others follow"},
        open=True,
    ),
    "verdicts": JsonDocument(
        command="optimize rules verify",
        keys={"file": "source of the rules", "counts": "number of rules by verdict", "rules": "a row per rule"},
    ),
    "load": JsonDocument(
        command="serve load",
        keys={
            "warnings": "conditions that make the figures doubtful",
            "models": "a row per model: requests, share answered in time, latencies",
            "series": "a row per second of the test",
        },
        open=True,
    ),
    "served-models": JsonDocument(command="serve models", keys={"models": "a row per model and version"}),
}


def print_json(kind: str, data: dict[str, Any]) -> None:
    """Print ``data`` on standard output as one JSON document; ``kind`` is a key of `OUTPUTS`."""
    print(dump_output(name_schema(kind, data)))


def name_schema(kind: str, data: dict[str, Any]) -> dict[str, Any]:
    """Return ``data`` with its schema, ``meshwright/KIND/VERSION``, as the first key."""
    return {"schema": f"meshwright/{kind}/{OUTPUTS[kind].version}", **data}


def print_document(document: Any) -> None:
    """Print an encoded document of `meshwright.spec`, which already contains its schema."""
    print(dump_output(document))


def dump_output(data: Any) -> str:
    """Return JSON text without control characters."""
    # json.dumps does not escape this control character.
    return json.dumps(data, indent=2, allow_nan=False).replace("\x7f", "\\u007f")
