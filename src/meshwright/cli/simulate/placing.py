"""``meshwright simulate DEPLOYMENT --place``: which devices hold which models, and their share of answers in time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.text import Text

from meshwright.cli.json_output import print_json
from meshwright.cli.latencies import shown_row
from meshwright.cli.output import print_tables
from meshwright.spec.deployment import Deployment, write_deployment
from meshwright.spec.units import format_count, format_percent

if TYPE_CHECKING:
    from meshwright.cli.simulate.request import SimulateRequest
    from meshwright.serving import Capacity, PlacedModels, ServingResult

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
        make_table([shown_row(row, shown) for row in served]),
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
