"""``meshwright simulate DEPLOYMENT``: models served under deadlines, on a virtual clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from meshwright.cli.json_output import name_schema, print_json
from meshwright.cli.latencies import shown_row
from meshwright.cli.output import note, print_tables
from meshwright.cli.simulate.joint import describe_joint, joint_rows
from meshwright.cli.simulate.placing import simulate_placed
from meshwright.cli.simulate.sweeps import put_sweep
from meshwright.spec.codec import document_kind, dump_json, read_document
from meshwright.spec.deployment import Deployment, read_deployment
from meshwright.spec.errors import DocumentError
from meshwright.spec.files import read_regular, write_text
from meshwright.spec.measurements import Measurements
from meshwright.spec.parsing import MAX_DOCUMENT_BYTES, read_data
from meshwright.spec.units import format_percent

if TYPE_CHECKING:
    from meshwright.cli.simulate.request import SimulateRequest
    from meshwright.serving import ServingResult
    from meshwright.serving.batching import Equation

# The text of a deployment contains this word, whether or not JSON escapes its slashes.
_KIND = "deployment"
_EQUATIONS: tuple[Equation, ...] = ("staggered", "uncoordinated")
# Simulated before requests count in searches for devices or rates, so that queues reach their steady length.
_WARM_UP_S = 1.0
_SHOWN = ("in_time_share", "goodput_per_s", "worst_p99_s", "busy_share")


def is_deployment(path: Path) -> bool:
    """Whether a file is a deployment; a TOML file without a kind is taken as one."""
    if path.suffix == ".toml":
        return document_kind(read_data(path)) in (_KIND, None)
    if not (path.is_file() and _KIND.encode() in read_regular(path, MAX_DOCUMENT_BYTES)):
        return False
    return document_kind(read_data(path)) == _KIND


def simulate_serving(path: Path, request: SimulateRequest) -> None:
    """Simulate a deployment under a policy, or several, or for many values; print and write the results."""
    from meshwright.serving import (
        check_counted,
        compare_policies,
        expand_deployment,
        load_policy,
        sweep_deployment,
        take_latencies,
    )
    from meshwright.simulator.scenarios import read_parameter

    _refuse_unused(request)
    deployment = read_deployment(path)
    if request.measurements is not None:
        deployment = take_latencies(deployment, _read_table(request.measurements))
    policy = request.policy or deployment.policy
    if request.sweep:
        parameters = [read_parameter(text) for text in request.sweep or ()]
        _refuse_swept({parameter.name for parameter in parameters}, request)
        sweep = sweep_deployment(
            parameters, replace(deployment, policy=policy), request.seconds, seed=request.seed, scale=request.scale
        )
        put_sweep(
            sweep, path.stem, request.out, request.plot, request.figure, as_json=request.as_json, usual=list(_SHOWN)
        )
        return
    if request.goodput:
        _print_goodput(deployment, [policy, *(request.against or ())], request)
        return
    given, deployment = deployment, expand_deployment(deployment, request.scale)
    if request.place is not None:
        simulate_placed(deployment, policy, request.place, request)
    elif request.capacity:
        _print_capacity(deployment, [policy, *(request.against or ())], request)
    else:
        policies = {name: load_policy(name) for name in dict.fromkeys([policy, *(request.against or ())])}
        results, rows = compare_policies(deployment, policies, request.seconds, seed=request.seed, scale=request.scale)
        result = results[policy]
        check_counted(result.num_requests, deployment.models, request.seconds, scale=request.scale)
        joint = joint_rows(given, request.scale)
        _print_result(given, policy, result, rows if request.against else [], request, joint)
    _note_traces(deployment, request.seconds + request.capacity * _WARM_UP_S, request.scale)


def _note_traces(deployment: Deployment, seconds: float, scale: float) -> None:
    """Print a note on standard error on traces that are shorter than ``seconds``."""
    from meshwright.serving import describe_traces

    for sentence in describe_traces(deployment.models, seconds, scale):
        note(sentence)


def _refuse_swept(names: set[str], request: SimulateRequest) -> None:
    """Raise DocumentError for an option whose values a sweep sets."""
    for name in sorted(names & {"policy", "scale", "seed"}):
        if f"--{name}" in request.given:
            raise DocumentError(f"--sweep {name}=… sets the values of --{name}. Leave --{name} out.")


def _read_table(path: Path) -> Measurements:
    if path.suffix != ".json":
        raise DocumentError(
            f"--measurements {path}: a deployment takes the measurements of one device, a file that ends in .json."
        )
    return read_document(Measurements, path)


def _refuse_unused(request: SimulateRequest) -> None:
    """Raise DocumentError for options that exclude each other."""
    if request.goodput and request.capacity:
        raise DocumentError("--goodput changes rates and --capacity devices. Ask for one of them.")
    if request.sweep and (request.goodput or request.capacity):
        sought = "--goodput" if request.goodput else "--capacity"
        raise DocumentError(f"{sought} is searched for, and --sweep simulates what is given. Ask for one of them.")
    if request.sweep and request.against:
        raise DocumentError("--sweep has policies as a parameter (policy=adaptive,symphony). Leave --against out.")
    if request.place is not None and (request.sweep or request.against or request.goodput):
        raise DocumentError("--place is for one policy, and for --capacity. Leave --sweep, --against, --goodput out.")
    if request.goodput and "--scale" in request.given:
        raise DocumentError("--goodput looks for the highest scale of all rates. Leave --scale out.")
    if request.place is not None:
        if request.out is not None and request.out.suffix not in (".json", ".toml"):
            raise DocumentError(f"--out {request.out}: choose a name that ends in .toml or .json.")
    elif request.out is not None and not request.sweep and request.out.suffix != ".json":
        raise DocumentError(f"--out {request.out}: results are written as JSON. Choose a name that ends in .json.")


def _print_result(
    deployment: Deployment,
    policy: str,
    result: ServingResult,
    rows: list[dict[str, Any]],
    request: SimulateRequest,
    joint: dict[str, list[dict[str, Any]]],
) -> None:
    from meshwright.report import make_table

    models = [model.row(result.seconds) for model in result.models]
    document = {
        "policy": policy,
        "seconds": result.seconds,
        **result.row(),
        **_bounds(deployment, request),
        "models": models,
        **joint,
        **({"policies": rows} if rows else {}),
        **({"fleet": result.scaled.points()} if result.scaled is not None else {}),
    }
    shown = ("model", "requests_per_s", "in_time_share", "p50_s", "p99_s", "mean_batch")
    scaled = ("device_s",) if result.scaled is not None else ()
    compared = ("policy", "goodput_per_s", "in_time_share", "worst_p99_s", "busy_share", *scaled, "regret_share")
    total = result.row()
    _put(
        document,
        request,
        f"{policy}: {total['goodput_per_s']:.4g} of {total['requests_per_s']:.4g} requests per second in time "
        f"({format_percent(total['in_time_share'], 2)}), devices busy {format_percent(total['busy_share'])}.",
        *_scaled_sentence(deployment, result),
        *((f"Devices loaded {result.num_loads} models.",) if result.num_loads is not None else ()),
        make_table([shown_row(row, shown) for row in models]),
        *describe_joint(joint),
        _bound_sentence(deployment, _bounds(deployment, request)),
        *((make_table([shown_row(row, compared) for row in rows]),) if rows else ()),
    )


def _scaled_sentence(deployment: Deployment, result: ServingResult) -> tuple[str, ...]:
    """The number of devices over time, if they scale."""
    if result.scaled is None:
        return ()
    up = result.scaled.series[:, 1]
    whole = deployment.devices * result.end_s
    return (
        f"{result.scaled.mean_devices:.2f} devices up in the mean, {up.min():.0f} to {up.max():.0f}, and "
        f"{result.scaled.num_starts} starts: {result.scaled.device_s:.4g} device-seconds, "
        f"{format_percent(result.scaled.device_s / whole if whole else 0.0)} of what all {deployment.devices} take.",
    )


def _put(document: dict[str, Any], request: SimulateRequest, *tables: Any) -> None:
    """Write the document if asked for, and print it or its tables."""
    if request.out is not None:
        write_text(dump_json(name_schema("serving-simulation", document)), request.out)
    if request.as_json:
        print_json("serving-simulation", document)
        return
    print_tables(*tables, *((Text(f"results written to {request.out}"),) if request.out is not None else ()))


def _print_goodput(deployment: Deployment, policies: Sequence[str], request: SimulateRequest) -> None:
    from meshwright.report import make_table
    from meshwright.serving import find_goodput, load_policy, scale_bound

    bounds = _bounds(deployment, request, _WARM_UP_S)
    rows, scales = [], []
    for name in dict.fromkeys(policies):
        scale, result = find_goodput(
            deployment, load_policy(name), request.seconds, seed=request.seed, warm_up_s=_WARM_UP_S
        )
        row = {"policy": name, "scale": scale, **result.row(), "bound_share": 0.0}
        if scale:
            bound = scale_bound(deployment, request.seconds, scale=scale, warm_up_s=_WARM_UP_S)
            row["bound_share"] = 1 / bound if bound else None
        else:
            row["in_time_share"] = None
        rows.append(row)
        scales.append(scale)
    _note_traces(deployment, request.seconds + _WARM_UP_S, max(scales))
    shown = ("policy", "scale", "goodput_per_s", "bound_share", "worst_p99_s", "mean_batch")
    _put(
        {"staggered_scale": bounds["staggered_scale"], "policies": rows},
        request,
        make_table([shown_row(row, shown) for row in rows]),
        _bound_sentence(deployment, bounds),
    )


def _print_capacity(deployment: Deployment, policies: Sequence[str], request: SimulateRequest) -> None:
    from meshwright.report import make_table
    from meshwright.serving import find_capacity, load_policy

    rows, told = [], ""
    for name in dict.fromkeys(policies):
        found = find_capacity(deployment, load_policy(name), request.seconds, seed=request.seed, scale=request.scale)
        worst = [
            min(model.in_time_share for model in result.models) if result else None
            for result in (found.result, found.fewer)
        ]
        rows.append(
            {
                "policy": name,
                "num_devices": found.devices,
                "worst_in_time_share": worst[0],
                "one_less_in_time_share": worst[1],
                "busy_share": found.result.busy_share,
                "staggered_devices": found.staggered,
                "uncoordinated_devices": found.uncoordinated if math.isfinite(found.uncoordinated) else None,
            }
        )
        without = f"{found.uncoordinated:.2f}" if math.isfinite(found.uncoordinated) else "no number does"
        told = f"If devices take turns, {found.staggered:.2f} suffice; if they do not, {without}."
    shown = ("policy", "num_devices", "worst_in_time_share", "one_less_in_time_share", "busy_share")
    _put({"policies": rows}, request, make_table([{name: row[name] for name in shown} for row in rows]), told)


def _bounds(deployment: Deployment, request: SimulateRequest, warm_up_s: float = 0.0) -> dict[str, float | None]:
    """The factor by which the rates can be multiplied, by equation; None if nothing arrives."""
    from meshwright.serving import scale_bound

    return {
        f"{equation}_scale": scale_bound(
            deployment, request.seconds, scale=request.scale, warm_up_s=warm_up_s, equation=equation
        )
        for equation in _EQUATIONS
    }


def _bound_sentence(deployment: Deployment, bounds: dict[str, float | None]) -> str:
    staggered, uncoordinated = bounds["staggered_scale"], bounds["uncoordinated_scale"]
    if staggered is None or uncoordinated is None:
        return "Nothing arrives."
    devices = "devices, if each held all models" if deployment.groups else "devices"
    return (
        f"Bound of these {devices}: {staggered:.3f} times these rates if devices take turns, "
        f"{uncoordinated:.3f} times if they do not."
    )
