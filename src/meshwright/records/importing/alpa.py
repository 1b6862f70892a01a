"""Alpa's profiling database (``prof_database.pkl``) and its result tables (``.tsv``) as rows of the measurement table.

The database holds, per mesh of (hosts, devices per host), lists of (elements of the full tensor, seconds) for each
collective over all groups of a factorisation of the mesh at once, and (floating-point operations, seconds) of square
matrix products (Zheng et al., OSDI 2022, artifact; ``alpa/mesh_profiling.py``). Two kinds of rows are not
measurements:

    noop      sizes at which the op does nothing: none at all, fewer elements than ranks (all-gather, reduce-scatter),
              fewer than ranks² (all-to-all): what was timed is the empty loop
    plateau   points that were raised so that bandwidth never falls with size: size / seconds is its neighbour's

Points of infinite seconds (a series that failed) are left out and counted.
"""

from __future__ import annotations

import ast
import math
from datetime import UTC, datetime
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.records.importing.imported import Imported
from meshwright.records.importing.pickled import Pairs, PickledObject, load_pickle
from meshwright.records.table import Row, columns_of, keep_sound, named_shapes
from meshwright.spec import DTYPE_BYTES, DocumentError

if TYPE_CHECKING:
    from collections.abc import Iterator

_RESULT = "alpa.mesh_profiling.MeshProfilingResult"
_OPS = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
_DTYPES = {"f16": "float16", "f32": "float32", "f64": "float64", "bf16": "bfloat16"}
# The artifact's database has 8,828 points in 260 series on at most 32 devices.
_MAX_POINTS = 1_000_000
_MAX_SERIES = 5_000
_MAX_DEVICES = 4_096
# Of a raised point, seconds / size is its neighbour's but for rounding.
_SAME = 1e-9


def read_database(content: bytes, *, device: str, source: str) -> Imported:
    """Rows of a profiling database on devices of one kind. Raises DocumentError for any other pickle."""
    meshes = _pairs(load_pickle(content, {_RESULT}), "a mapping of meshes")
    rows: list[Row] = []
    num_series = 0
    for key, result in meshes:
        if not isinstance(result, PickledObject) or result.state is None:
            raise DocumentError(f"{source}: expected a profiling result for each mesh; this is another pickle.")
        num_nodes, per_node = _mesh(key, source)
        tables = {name: table for name, table in result.state.items if isinstance(name, str)}
        series: Iterator[Iterator[Row]] = chain(
            (_collective(op, *item, num_nodes, per_node) for op in _OPS for item in _table(tables, f"{op}_cost_dict")),
            (_products(*item) for item in _table(tables, "dot_cost_dict")),
        )
        for points in series:
            rows.extend(points)
            num_series += 1
            if num_series > _MAX_SERIES or len(rows) > _MAX_POINTS:
                raise DocumentError(
                    f"{source}: more than {_MAX_SERIES} series or {_MAX_POINTS} points. Check which file was meant."
                )
    # The products are the same on every mesh: they were timed once.
    distinct = {(row["op"], row["shapes"], row["dtype"], row["seconds"]): row for row in rows}
    if twice := len(distinct) - len({identity[:3] for identity in distinct}):
        raise DocumentError(
            f"{source}: {twice} points were measured twice, with different times. Leave one of the two series out."
        )
    columns = columns_of(distinct.values(), ("op", "shapes", "dtype", "seconds", "flags"))
    records, left_out = keep_sound(**columns, device=device, software="Alpa (OSDI'22)", source=source)
    return Imported(kind="Alpa's profiling database", records=records, left_out=left_out)


def read_results(text: str, *, device: str, source: str) -> Imported:
    """Step times of Alpa's result tables: rows of latencies in seconds; failed ones and rates alone are left out."""
    rows: list[Row] = []
    left_out = {"failed, or no latency": 0}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        cells = line.split("\t")
        if len(cells) != 8:
            left_out["failed, or no latency"] += 1
            continue
        _, _, hosts, per_host, model, method, figures, when = cells
        try:
            known = ast.literal_eval(figures)
            latencies = np.array(known.get("latencies", []), np.float64)
            sizes = {"nodes": int(hosts), "devices_per_node": int(per_host)}
            parameters = round(1e9 * float(known.get("param_count", 0)))
            date = datetime.fromtimestamp(int(when), UTC).strftime("%Y-%m-%d")
        except (
            ValueError,
            SyntaxError,
            TypeError,
            AttributeError,
            MemoryError,
            RecursionError,
            ArithmeticError,
            OSError,
        ):
            raise DocumentError(f"{source}: {line[:100]!r} is not a row of Alpa's results. Check the file.") from None
        if not len(latencies) or not (latencies > 0).all():
            left_out["failed, or no latency"] += 1
            continue
        middle = float(np.median(latencies))
        low, high = np.percentile(latencies, (10, 90))
        rows.append(
            {
                "op": f"training_step.{model}",
                "shapes": named_shapes(**sizes, parameters=parameters),
                "kernel": method,
                "seconds": middle,
                "spread": (high - low) / middle,
                "num_samples": len(latencies),
                "date": date,
            }
        )
    columns = columns_of(rows, ("op", "shapes", "kernel", "seconds", "spread", "num_samples", "date"))
    records, odd = keep_sound(**columns, device=device, software="Alpa (OSDI'22)", source=source)
    return Imported(kind="Alpa's results", records=records, left_out={**left_out, **odd})


def _collective(op: str, key: Any, points: Any, num_nodes: int, per_node: int) -> Iterator[Row]:
    match key:
        case (tuple() as groups, str() as code) if code in _DTYPES:
            num_groups, ranks, stride = _layout(groups)
        case _:
            raise DocumentError(f"The key of a series of {op} is not (groups of devices, dtype). Check the file.")
    dtype = _DTYPES[code]
    least = {"all_to_all": ranks**2, "all_reduce": 1}.get(op, ranks)
    where = {"ranks": ranks, "groups": num_groups, "stride": stride, "nodes": num_nodes, "devices_per_node": per_node}
    for size, seconds, raised in _points(points):
        flag = "noop" if size < least else "plateau" if raised else ""
        shapes = named_shapes(bytes=size * DTYPE_BYTES[dtype], **where)
        yield {"op": op, "shapes": shapes, "dtype": dtype, "seconds": seconds, "flags": flag}


def _products(key: Any, points: Any) -> Iterator[Row]:
    match key:
        case (_, str() as code) if code in _DTYPES:
            pass
        case _:
            raise DocumentError("The key of a series of products is not (shape, dtype). Check the file.")
    for flops, seconds, raised in _points(points):
        side = round((flops / 2) ** (1 / 3))
        if 2 * side**3 != flops:
            raise DocumentError(f"A product of {flops} operations is of no square matrices. Check the file.")
        flag = "noop" if flops == 0 else "plateau" if raised else ""
        shapes = named_shapes(m=side, n=side, k=side)
        yield {"op": "matmul", "shapes": shapes, "dtype": _DTYPES[code], "seconds": seconds, "flags": flag}


def _points(points: Any) -> Iterator[tuple[int, float, bool]]:
    """(size, seconds, whether it was raised to its neighbour's rate) of a series."""
    if type(points) is not list or len(points) > _MAX_POINTS // 100:
        raise DocumentError("A series of Alpa's database is not a list of points, or is too long. Check the file.")
    before = math.nan
    for point in points:
        match point:
            case (int() as size, float() as seconds) if size >= 0:
                per_size = seconds / size if size else math.nan
                yield size, seconds, abs(per_size - before) <= _SAME * before
                before = per_size
            case _:
                raise DocumentError("A point of Alpa's database is not (size, seconds). Check the file.")


def _layout(groups: tuple[Any, ...]) -> tuple[int, int, int]:
    """(number of groups, ranks of each, distance between the ranks of a group) of groups of device ids."""
    if not groups or not all(type(group) is tuple and len(group) == len(groups[0]) for group in groups):
        raise DocumentError("The groups of a series are not tuples of one length. Check the file.")
    if not 0 < len(groups) * len(groups[0]) <= _MAX_DEVICES:
        raise DocumentError(f"The groups of a series hold more than {_MAX_DEVICES} devices, or none. Check the file.")
    if not all(type(device) is int for group in groups for device in group):
        raise DocumentError("The groups of a series contain values that are not device ids. Check the file.")
    distances = {there - here for group in groups for here, there in pairwise(group)}
    if len(distances) > 1 or (distances and min(distances) < 1):
        raise DocumentError("The ranks of a group are not equally far apart; such groups have no row. Check the file.")
    return len(groups), len(groups[0]), distances.pop() if distances else 0


def _mesh(key: Any, source: str) -> tuple[int, int]:
    match key:
        case (_, (int() as hosts, int() as devices)) if hosts > 0 and devices > 0:
            return hosts, devices
        case _:
            raise DocumentError(f"{source}: a mesh's key is not (cluster, (hosts, devices per host)). Check the file.")


def _pairs(value: Any, expected: str) -> list[tuple[Any, Any]]:
    if not isinstance(value, Pairs):
        raise DocumentError(f"A pickle of another kind; expected {expected}. Check which file was meant.")
    return value.items


def _table(tables: dict[str, Any], name: str) -> list[tuple[Any, Any]]:
    found = tables.get(name)
    return _pairs(found, f"a mapping {name}") if found else []
