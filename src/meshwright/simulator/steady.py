"""The figures of a steady step: rows for ``--json``, and one line for people.

MFU counts the FLOPs of the graph's forward and backward for the global batch, each once; HFU counts all FLOPs that the
devices execute, including recompute and ops repeated in several stages. Both are shares of what the plan's devices
could execute in the step at their peak rate for the plan's precision.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from meshwright.simulator.simulation import Simulation
from meshwright.spec import format_percent, format_seconds

Row = dict[str, Any]

# From this share of the step on, the host's issue time bounds it; in a pipeline other ranks' steps may be a bit longer.
_BINDING_SHARE = 0.99


def steady_rows(result: Simulation) -> Row:
    """Return ``step_time_s``, ``samples_per_s``, ``bubble_share``, ``mfu_share``, ``hfu_share``, and ``ranks``.

    A row of ``ranks`` has the seconds of `RankSeconds`, ``busy_s`` and the three shares of the step that busy,
    exposed communication and the rest of the idle time take, which add up to 1.
    """
    return {
        "step_time_s": result.step_time_s,
        "samples_per_s": result.samples_per_s,
        "bubble_share": result.bubble_fraction,
        "mfu_share": result.mfu,
        "hfu_share": result.hfu,
        "ranks": [_rank_row(result, rank) for rank in range(len(result.ranks))],
    }


def describe_steady_step(result: Simulation) -> str:
    """Return ``Steady step: 63.3 ms, bubble 20.7 %, MFU 31.0 %, HFU 31.0 % ...``; without a peak rate no MFU and HFU.

    With asynchronous hosts, a sentence gives the issue time of the slowest one.
    """
    facts = [format_seconds(result.step_time_s), f"bubble {format_percent(result.bubble_fraction)}"]
    if result.mfu is not None and result.hfu is not None:
        facts += [f"MFU {format_percent(result.mfu)}", f"HFU {format_percent(result.hfu)}"]
    return f"Steady step: {', '.join(facts)}.{_describe_host(result)}"


def _describe_host(result: Simulation) -> str:
    host_s, step_s = max(rank.host_s for rank in result.ranks), result.step_time_s
    if not host_s:
        return ""
    binds = ", which bounds the step" if host_s >= _BINDING_SHARE * step_s else ""
    return f" The host issues kernels for {format_seconds(host_s)} of {format_seconds(step_s)}{binds}."


def _rank_row(result: Simulation, rank: int) -> Row:
    seconds, step_s = result.ranks[rank], result.step_time_s
    exposed_s = seconds.exposed_communication_s
    shares = {"busy": seconds.busy_s, "exposed": exposed_s, "waiting": seconds.idle_s - exposed_s}
    return {
        "rank": rank,
        "busy_s": seconds.busy_s,
        **asdict(seconds),
        **{f"{name}_share": value / step_s if step_s else 0.0 for name, value in shares.items()},
    }
