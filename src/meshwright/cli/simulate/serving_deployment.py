"""``meshwright simulate DEPLOYMENT``: models served under deadlines on a virtual clock; ``--place`` places them first.

A query calls several models, and its deadline is split over the calls. Models with a common trunk share the trunk
(`joint_rows`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from meshwright.cli.json_output import name_schema, print_json
from meshwright.cli.output import note, print_tables
from meshwright.cli.simulate.scenario_output import put_sweep
from meshwright.spec import (
    Deployment,
    DocumentError,
    Measurements,
    Trunk,
    format_count,
    format_percent,
    format_seconds,
    read_deployment,
    read_document,
    read_regular,
    write_deployment,
    write_text,
)
from meshwright.spec.codec import document_kind, dump_json
from meshwright.spec.joint_models import MOST_RATE
from meshwright.spec.parsing import MAX_DOCUMENT_BYTES, read_data

if TYPE_CHECKING:
    from meshwright.cli.simulate.simulate_request import SimulateRequest
    from meshwright.serving import Capacity, PlacedModels, ServingResult
    from meshwright.serving.batching import Equation


_SHOWN_NAMES = 6


def simulate_placed(deployment: Deployment, name: str, method: str, request: SimulateRequest) -> None:
    """Place the models, with --capacity on the fewest devices; simulate, print, and write the deployment."""
    from meshwright.serving import check_counted, find_capacity, load_policy, place_models, simulate_deployment

    policy = load_policy(name)

    def place(devices: Deployment, warm_up_s: float = 1.0) -> PlacedModels:
        return place_models(
            devices,
            policy,
            request.seconds,
            method=method,
            seed=request.seed,
            scale=request.scale,
            warm_up_s=warm_up_s,
        )

    capacity = None
    deployment = replace(deployment, groups=())
    if request.capacity:
        capacity = find_capacity(
            deployment,
            policy,
            request.seconds,
            seed=request.seed,
            scale=request.scale,
            place=lambda devices: place(devices).deployment,
        )
        placed, result = place(replace(deployment, devices=capacity.devices)), capacity.result
    else:
        placed = place(deployment, 0.0)
        result = simulate_deployment(placed.deployment, policy, request.seconds, seed=request.seed, scale=request.scale)
    check_counted(result.num_requests, deployment.models, request.seconds, scale=request.scale)
    if request.out is not None:
        write_deployment(placed.deployment, request.out)
    _print_placed(placed, name, result, capacity, request)


def _print_placed(
    placed: PlacedModels, policy: str, result: ServingResult, capacity: Capacity | None, request: SimulateRequest
) -> None:
    from meshwright.report import make_table
    from meshwright.serving import bound_placed

    bound = bound_placed(placed.deployment, result)
    groups, served = _group_rows(placed.deployment, result), [model.row(result.seconds) for model in result.models]
    total = result.row()
    if request.as_json:
        print_json(
            "model-placement",
            {
                "policy": policy,
                "method": placed.method,
                "num_devices": placed.deployment.devices,
                "seconds": result.seconds,
                **total,
                "planned_in_time_share": placed.planned_share,
                "bound_in_time_share": bound,
                **({"staggered_devices": capacity.staggered} if capacity else {}),
                "groups": groups,
                "models": served,
                **({"out": str(request.out)} if request.out is not None else {}),
            },
        )
        return
    shown = ("model", "requests_per_s", "in_time_share", "p99_s", "mean_batch")
    sentences = [
        f"{placed.method}, {policy}: {format_count(placed.deployment.devices, 'device')} answer "
        f"{total['goodput_per_s']:.4g} of {total['requests_per_s']:.4g} requests per second in time "
        f"({format_percent(total['in_time_share'], 2)}); no placement could answer more than "
        f"{format_percent(bound, 2)}{', if batches took as long as they should' if placed.deployment.jitter else ''}."
    ]
    if capacity:
        sentences.append(f"If devices that hold all models took turns, {capacity.staggered:.2f} would suffice.")
    print_tables(
        sentences[0],
        make_table([row | {"models": _shorten(row["models"])} for row in groups]),
        make_table([_shown_row(row, shown) for row in served]),
        *sentences[1:],
        *((Text(f"deployment written to {request.out}"),) if request.out is not None else ()),
    )


def _group_rows(deployment: Deployment, result: ServingResult) -> list[dict[str, Any]]:
    rows, first = [], 0
    for group in deployment.groups:
        busy = result.busy_s[first : first + group.devices]
        rows.append(
            {
                "num_devices": group.devices,
                "models": list(group.models),
                **({"memory_bytes": deployment.memory_of(group.models)} if deployment.device_memory else {}),
                "busy_share": float(busy.mean() / result.end_s) if result.end_s else 0.0,
            }
        )
        first += group.devices
    return rows


def _shorten(names: list[str]) -> str:
    more = len(names) - _SHOWN_NAMES
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def joint_rows(deployment: Deployment, scale: float = 1.0) -> dict[str, list[dict[str, Any]]]:
    """Return rows under ``queries`` and ``trunks``, if the deployment has any, at ``scale`` times their rates.

    A query's row has the split of its deadline over its calls, a trunk's row the devices with the trunk shared and with
    a trunk for each head. A number of devices is None if no number suffices.
    """
    rows = {"queries": _split_rows(deployment, scale), "trunks": _trunk_rows(deployment.trunks, scale)}
    return {name: found for name, found in rows.items() if found}


def describe_joint(rows: Mapping[str, Sequence[dict[str, Any]]]) -> list[Any]:
    """Return, for rows of `joint_rows`, a table of all calls, and a sentence for each query and trunk."""
    from meshwright.report import make_table

    queries, trunks = rows.get("queries", ()), rows.get("trunks", ())
    calls = [call for row in queries for call in row["calls"]]
    return [*((make_table(calls),) if calls else ()), *map(_tell_split, queries), *map(_tell_trunk, trunks)]


def _split_rows(deployment: Deployment, scale: float) -> list[dict[str, Any]]:
    """The split of each query, and the devices that it and the even split need."""
    from meshwright.serving import call_rates, devices_of, split_evenly, split_time

    rows, overhead_s = [], deployment.delay + deployment.slack
    for query in deployment.queries:
        times = split_time(query, scale=scale, overhead_s=overhead_s)
        even, rates = split_evenly(query), call_rates(query)
        needed, even_devices = (devices_of(query, split, scale=scale, overhead_s=overhead_s) for split in (times, even))
        rows.append(
            {
                "query": query.name,
                "slo_s": float(query.slo),
                "staggered_devices": needed,
                "even_devices": even_devices if math.isfinite(even_devices) else None,
                "calls": [
                    {
                        "call": f"{query.name}.{call.name}",
                        "requests_per_s": rates[call.name] * scale,
                        "time_s": times[call.name],
                        "even_time_s": even[call.name],
                    }
                    for call in query.calls
                ],
            }
        )
    return rows


def _tell_split(row: dict[str, Any]) -> str:
    needed, even = row["staggered_devices"], row["even_devices"]
    said = f"Query {row['query']}: {needed:.2f} devices suffice with this split of its time"
    if even is None:
        return f"{said}; split evenly, some call would have less time than a batch of one takes."
    saved = f" ({format_percent(1 - needed / even)} saved)" if even else ""
    return f"{said}, {even:.2f} with an even split{saved}."


def _trunk_rows(trunks: Sequence[Trunk], scale: float) -> list[dict[str, Any]]:
    from meshwright.serving import devices_shared

    rows = []
    for trunk in trunks:
        heads = tuple(replace(head, rate=min(head.rate * scale, MOST_RATE)) for head in trunk.heads)
        shared, apart = devices_shared(replace(trunk, heads=heads))
        rows.append(
            {
                "trunk": trunk.name,
                "num_heads": len(trunk.heads),
                "staggered_devices": shared,
                "apart_devices": apart if math.isfinite(apart) else None,
            }
        )
    return rows


def _tell_trunk(row: dict[str, Any]) -> str:
    apart = row["apart_devices"]
    return (
        f"Trunk {row['trunk']}: {row['staggered_devices']:.2f} devices suffice for its "
        f"{format_count(row['num_heads'], 'head')} together, "
        + (f"{apart:.2f} with a trunk for each head." if apart is not None else "no number with a trunk for each head.")
    )


# The text of a deployment contains this word, whether or not JSON escapes its slashes.
_KIND = "deployment"
_EQUATIONS: tuple[Equation, ...] = ("staggered", "uncoordinated")
# Simulated before requests count in searches for devices or rates, so that queues reach their steady length.
_WARM_UP_S = 1.0
_SHOWN = ("in_time_share", "goodput_per_s", "worst_p99_s", "busy_share")


def is_deployment(path: Path) -> bool:
    """Return whether a file is a deployment; a TOML file without a kind is taken as one."""
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
            f"--measurements {path}: a deployment takes the measurements of one device. Give a file that ends in .json."
        )
    return read_document(Measurements, path)


def _refuse_unused(request: SimulateRequest) -> None:
    """Raise DocumentError for options that exclude each other."""
    if request.goodput and request.capacity:
        raise DocumentError("--goodput searches rates, --capacity numbers of devices. Give one of them.")
    if request.sweep and (request.goodput or request.capacity):
        sought = "--goodput" if request.goodput else "--capacity"
        raise DocumentError(f"{sought} searches a value, --sweep simulates given values. Give one of them.")
    if request.sweep and request.against:
        raise DocumentError(
            "--sweep compares policies as a parameter: --sweep policy=adaptive,symphony. Leave --against out."
        )
    if request.place is not None and (request.sweep or request.against or request.goodput):
        raise DocumentError(
            "--place works with one policy, and with --capacity. Leave --sweep, --against and --goodput out."
        )
    if request.goodput and "--scale" in request.given:
        raise DocumentError("--goodput searches the highest scale of all rates. Leave --scale out.")
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
        make_table([_shown_row(row, shown) for row in models]),
        *describe_joint(joint),
        _bound_sentence(deployment, _bounds(deployment, request)),
        *((make_table([_shown_row(row, compared) for row in rows]),) if rows else ()),
    )


def _scaled_sentence(deployment: Deployment, result: ServingResult) -> tuple[str, ...]:
    """The number of devices over time, if they scale."""
    if result.scaled is None:
        return ()
    up = result.scaled.series[:, 1]
    whole = deployment.devices * result.end_s
    return (
        f"{result.scaled.mean_devices:.2f} devices up on average, {up.min():.0f} to {up.max():.0f}, and "
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
        make_table([_shown_row(row, shown) for row in rows]),
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
        without = f"{found.uncoordinated:.2f}" if math.isfinite(found.uncoordinated) else "no number"
        told = f"Enough devices: {found.staggered:.2f} if staggered, {without} if not coordinated."
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
        f"Upper bound for these {devices}: {staggered:.3f} times these rates if their batches are staggered, "
        f"{uncoordinated:.3f} times if they are not coordinated."
    )


def _shown_row(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return these figures of a row, with "> 200 ms" for a latency known only to exceed that."""
    shown = {}
    for name in names:
        over = row.get(f"{name.removesuffix('_s')}_over_s")
        shown[name] = f"> {format_seconds(over)}" if over is not None else row.get(name)
    return shown
