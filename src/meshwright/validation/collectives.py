"""Errors of predictions of collectives on public measurements: between sizes, on a larger cluster, in other groups.

`score_collectives` gives all scores; `score_datasheet` those of datasheet costs, `score_shipped` those of shipped
models, which `fit_datasheet_errors` and `fit_shipped` fit.

    v100    message sizes left out in folds (`meshwright.validation.series`); and a cluster that was never profiled:
            fitted on two nodes of eight V100, scored on four nodes, for groups that cross nodes, 64 MiB and more
    nccl    groups of 4 in NCCL tables of A100, B200, H100, H200 and L40S, fitted on groups of 2 and 8; groups of 3, 5,
            6 and 7 of vTrain's all-reduces, fitted on 2, 4 and 8; all for 1 MiB and more, and separately for the
            smallest and the largest messages of each table. Also the shipped models, on tables that they were not
            fitted on, and costs by datasheet, with the interval of the other kinds of device

`fit_collectives` is fitted on the training rows alone; none of its numbers is tuned on other rows. Its form was chosen
differently: most of it follows from NCCL's sources, groups inside one node of the V100s and groups of 4 of vTrain's
tables (training rows here). But three choices were made after a look at scores of scored rows: trees where no ring
closes, the geometric mean of the two neighbouring groups, and one line for all series of a layout
(docs/concepts/collectives.md). Scores that depend on these choices carry a note.

Baselines are fitted on the same rows by least squares of relative errors, with terms that are not negative. One is the
line α·steps + β·(bytes through the port) of the ring (on the NCCL tables it is fitted on messages of the scored sizes,
1 MiB and more; for the end sizes on all). On the cluster there is also a sum of five terms with NIC sharing: 1, steps,
log₂ n, bytes by the group's link, bytes by the NIC.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from sklearn.linear_model import LinearRegression

from meshwright.cost.collectives import CollectiveGroup, CollectiveModel, CollectiveOp, fit_collectives
from meshwright.cost.collectives.algorithms import count_steps, port_share
from meshwright.cost.collectives.datasheet import DatasheetErrors, bound_cost, quote_collective
from meshwright.cost.collectives.fitted import ErrorScale
from meshwright.cost.collectives.fitting import collective_rows, groups_of
from meshwright.cost.collectives.shipped_fits import ShippedCollectives, ShippedKind, widen
from meshwright.cost.costs import Floats, Interval, Predictions, join_predictions
from meshwright.records import COLUMNS, Records, concat_records
from meshwright.spec import load_cluster
from meshwright.validation.collective_rows import digest_rows, fit_alike, predict_rows, table_of, topology_of
from meshwright.validation.datasets import load_records
from meshwright.validation.scores import Score, refuse_seen, score_rows
from meshwright.validation.series import OPS, score_series

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from meshwright.cost import Basis

    Terms = Callable[[CollectiveOp, CollectiveGroup], tuple[list[float], list[float]]]


_ERRORS_SOURCE = (
    "NCCL tables of ai-dynamo/aiconfigurator and VIA-Research/vTrain (inside) and Alpa's profile of V100 nodes "
    "(across), as in validation/data/nccl.parquet and v100.parquet"
)
# Less than any message takes; logarithms stay finite.
_NOTHING_S = 1e-12
_BASIS: tuple[Basis, ...] = ("roofline",)


def fit_datasheet_errors(inside: Records, across: Records) -> DatasheetErrors:
    """Return, by op, the interval of measured / estimated of costs by datasheet, inside a node and across nodes.

    The rows' devices must have shipped datasheets.
    """
    inner, outer = collective_rows(inside), crossing_rows(across)
    return DatasheetErrors(
        source=_ERRORS_SOURCE,
        devices=tuple(sorted(set(inner.device))),
        rows_sha256=digest_rows(inner, outer),
        inside=_fit_scales(inner),
        across=_fit_scales(outer),
    )


# `fit_datasheet_errors` makes the shipped factors from all rows: those of the NCCL tables inside a node, those of the
# V100 cluster across nodes. `score_datasheet` fits them on all kinds of device but one and asks for that one, in turn,
# and across nodes on two nodes for four, so that no row is in its own interval. Every kind of device counts the same,
# by the percentiles of its measured / estimated, however many rows it has.
def score_datasheet() -> tuple[Score, ...]:
    """Score costs by datasheet, per op.

    The interval of each kind of device is fitted on the other kinds; that across four nodes on two nodes.
    """
    rows, crossing = collective_rows(load_records("nccl")), crossing_rows(load_records("v100"))
    asked = {device: (rows.select(rows.device != device), rows.where(device=device)) for device in set(rows.device)}
    parts = {f"{device} {{}} by datasheet": asked[device] for device in sorted(asked)}
    fewer = crossing.size("nodes") < 4
    parts["V100 {} across four nodes by datasheet"] = crossing.select(fewer), crossing.select(~fewer)
    scores = []
    for part, (known, left_out) in parts.items():
        scales = _fit_scales(known)
        for op in sorted(set(left_out.op)):
            mine = left_out.where(op=op)
            estimated, latency_s = estimate_rows(mine)
            low_s, high_s = bound_cost(estimated, latency_s, scales[op])
            found = Predictions(seconds=estimated, low_s=low_s, high_s=high_s, basis=_BASIS * len(mine))
            dataset = "v100" if "across" in part else "nccl"
            scores.append(score_rows(dataset, part.format(op), "ours", mine.seconds, found))
    return tuple(scores)


def crossing_rows(rows: Records) -> Records:
    """Return the rows of groups that cross nodes and can be fitted (`collective_rows`)."""
    usable = collective_rows(rows)
    return usable.select(np.array([group.num_nodes > 1 for group in groups_of(usable)], bool))


def estimate_rows(rows: Records) -> tuple[Floats, Floats]:
    """Return, for rows of one op, seconds by datasheet, and the latency (seconds of the smallest message).

    Both have shape (rows,).
    """
    estimated, latency_s = np.empty(len(rows)), np.empty(len(rows))
    sizes, names = rows.size("bytes").astype(np.float64), ("nodes", "devices_per_node", "ranks", "stride")
    places = list(zip(rows.device, groups_of(rows), *(rows.size(name).tolist() for name in names), strict=True))
    for place in dict.fromkeys(places):
        device, group, num_nodes, per_node, count, stride = place
        mine = np.array([other == place for other in places], bool)
        # Tables of one node do not say how many devices theirs has; those that ship have eight.
        cluster = load_cluster(f"{num_nodes}x{max(per_node, 8)}x{device}")
        tariff = quote_collective(cluster, rows.op[0], range(0, count * stride, stride), group)
        estimated[mine], latency_s[mine] = tariff.estimate(sizes[mine]), tariff.latency_s.min()
    return estimated, latency_s


def _fit_scales(rows: Records) -> dict[str, ErrorScale]:
    """The factors of each op among usable rows."""
    scales = {}
    for op in sorted(set(rows.op)):
        mine = rows.where(op=op)
        estimated, latency_s = estimate_rows(mine)
        in_latency = latency_s > estimated / 2
        latency = _factors(mine.seconds / estimated, mine.device, in_latency)
        # What bytes take above that: the ends of the interval are those of both parts.
        wire = np.maximum(estimated - latency_s, _NOTHING_S)
        low, high = (
            _factors(np.maximum(mine.seconds - latency_s * end, _NOTHING_S) / wire, mine.device, ~in_latency)
            for end in (latency.low, latency.high)
        )
        scales[op] = ErrorScale(latency=latency, bandwidth=Interval(low=low.low, high=high.high))
    return scales


def _factors(ratios: Floats, devices: NDArray[np.object_], regime: NDArray[np.bool_]) -> Interval:
    """The interval of measured / estimated in a regime."""
    return fit_alike(ratios[regime & (devices == name)] for name in sorted(set(devices[regime])))


_DATASET = "nccl"
_SOURCE = (
    "NCCL tables of ai-dynamo/aiconfigurator and VIA-Research/vTrain, as in validation/data/nccl.parquet; ops that "
    "these do not have of a kind from Alpa's profile, v100.parquet"
)
# Of a table that is predicted from the others, both with the model's own interval: an op's rows and what was said.
LeftOut = dict[str, list[tuple[Records, Predictions]]]


# A table is what one source measured on one kind of device with one version of NCCL. `fit_shipped` pools the tables of
# a kind, dtypes and versions alike, because they differ among themselves by less than from another machine. The
# interval comes from tables: each is predicted from the other tables of its kind, at sizes that those span. It weighs
# every kind of device equally, by percentiles of its measured / predicted; in `score_shipped` it is that of the other
# kinds. Only the A100 was measured by two parties; the other tables of a kind come from one. For ops that no table of a
# kind has, Alpa's measurements inside a node of V100s are used.
def fit_shipped() -> ShippedCollectives:
    """Return a model for each kind of device in the NCCL tables, fitted to all its rows, as shipped."""
    usable = _with_profiled(collective_rows(load_records(_DATASET)))
    kinds = []
    for device in sorted(set(usable.device)):
        mine = usable.where(device=device)
        kinds.append(
            ShippedKind(
                link_bytes_per_s=load_cluster(f"8x{device}").nodes[0].device_link.bandwidth_bytes_per_s,
                software=tuple(sorted(set(mine.software))),
                rows_sha256=digest_rows(mine),
                model=_round(_fit(mine)),
            )
        )
    return ShippedCollectives(source=_SOURCE, elsewhere=fit_elsewhere(leave_tables_out()), kinds=tuple(kinds))


def score_shipped() -> tuple[Score, ...]:
    """Score each NCCL table with a model that is fitted on the other tables of its kind of device, per kind and op.

    Intervals come from the other kinds of device. Costs by datasheet are scored for comparison.
    """
    left_out = leave_tables_out()
    scores = []
    for device, parts in left_out.items():
        elsewhere = fit_elsewhere({other: mine for other, mine in left_out.items() if other != device})
        for op in sorted({rows.op[0] for rows, _ in parts}):
            mine = [(rows, widen(found, elsewhere)) for rows, found in parts if rows.op[0] == op]
            measured = np.concatenate([rows.seconds for rows, _ in mine])
            estimated = np.concatenate([estimate_rows(rows)[0] for rows, _ in mine])
            part = f"{device} {op} from other tables of the device"
            scores.append(score_rows(_DATASET, part, "ours", measured, join_predictions([found for _, found in mine])))
            scores.append(score_rows(_DATASET, part, "by datasheet", measured, estimated))
    return tuple(scores)


@cache
def leave_tables_out() -> LeftOut:
    """Return, for each kind of device with two tables or more, pairs of (rows of one table and op, predictions).

    The predictions come from a model that is fitted on the other tables of that kind.
    """
    rows = collective_rows(load_records(_DATASET))
    tables = np.array(["\n".join(table_of(rows, index)) for index in range(len(rows))], object)
    found: LeftOut = {}
    for device in sorted(set(rows.device)):
        for table in sorted(set(tables[rows.device == device])):
            others, mine = rows.select((rows.device == device) & (tables != table)), rows.select(tables == table)
            if not len(others):
                continue
            # Two rows of the B200 say the very same in two files.
            mine = mine.select(~np.isin(mine.row_hashes(), others.row_hashes()))
            model = _fit(others)
            for asked in _spanned(mine, others):
                found.setdefault(device, []).append((asked, predict_rows(model, asked)))
    return found


def fit_elsewhere(left_out: Mapping[str, list[tuple[Records, Predictions]]]) -> Interval:
    """Return the 80 % interval of measured / predicted over all pairs of `leave_tables_out`."""
    return fit_alike(
        np.concatenate([rows.seconds / said.seconds for rows, said in parts]) for parts in left_out.values()
    )


def _with_profiled(tables: Records) -> Records:
    """The tables; for ops that no table has, Alpa's profile of groups inside a node."""
    profiled = collective_rows(load_records("v100"))
    known = set(zip(tables.device, tables.op, strict=True))
    new = [
        group.num_nodes == 1 and (device, op) not in known
        for group, device, op in zip(groups_of(profiled), profiled.device, profiled.op, strict=True)
    ]
    return concat_records([tables, profiled.select(np.array(new, bool))])


def _fit(rows: Records) -> CollectiveModel:
    """One model of a kind of device, dtypes and versions pooled."""
    columns = {name: getattr(rows, name) for name in COLUMNS}
    return fit_collectives(Records(**{**columns, "dtype": np.full(len(rows), "", object)}), topology_of(rows.device[0]))


def _spanned(mine: Records, others: Records) -> Iterator[Records]:
    """The rows of each op of a table whose sizes lie among those that the others have of the op."""
    for op in sorted(set(mine.op) & set(others.op)):
        asked, sizes = mine.where(op=op), others.where(op=op).size("bytes")
        spanned = asked.select((asked.size("bytes") >= sizes.min()) & (asked.size("bytes") <= sizes.max()))
        if len(spanned):
            yield spanned


def _round(model: CollectiveModel) -> CollectiveModel:
    """Sizes to a tenth of a byte, seconds to four digits, no measured sizes: on another machine none is."""
    series = tuple(
        replace(
            one,
            measured=(),
            sizes=tuple(round(size, 1) for size in one.sizes),
            seconds=tuple(float(f"{seconds:.4g}") for seconds in one.seconds),
        )
        for one in model.series
    )
    return replace(model, series=series, row_hashes=())


# The project's targets in per cent: of the cluster never profiled by op, of the NCCL tables.
_CLUSTER_TARGETS = {"all_reduce": 12.0, "all_gather": 5.0, "reduce_scatter": 6.0, "all_to_all": 10.0}
_GROUPS_TARGET = 10.0
# What is shown with a target where the form of the predictor was chosen with a view of these rows.
_NOTE = (
    "form chosen with these rows in view: trees where no ring closes, geometric mean of the neighbouring groups, one "
    "line for all series of a layout"
)
_LARGE_BYTES, _MEDIUM_BYTES = 64 * 2**20, 2**20
# Devices of a node of the V100 cluster.
_PER_NODE = 8


def score_collectives() -> tuple[Score, ...]:
    """Return all scores of collectives; takes minutes (five folds of five ops)."""
    return (*score_series(), *score_new_cluster(), *score_new_groups(), *score_shipped(), *score_datasheet())


def score_new_cluster() -> tuple[Score, ...]:
    """Score, per op, collectives on four nodes predicted from two nodes, with and without plateau points."""
    rows = load_records("v100")
    rows = rows.select(rows.op != "matmul")
    rows = rows.select(rows.size("devices_per_node") == _PER_NODE)
    crossing = (rows.size("ranks") - 1) * rows.size("stride") >= _PER_NODE
    on_two, on_four = (rows.size("nodes") == count for count in (2, 4))
    model = fit_collectives(rows.select(on_two), topology_of("V100"))
    asked = rows.select(on_four & crossing & (rows.size("bytes") >= _LARGE_BYTES) & ~rows.has_flag("noop"))
    refuse_seen("v100", _seen(model), asked.row_hashes())
    base = collective_rows(rows.select(on_two & crossing))
    scores = []
    for op in OPS:
        mine = asked.where(op=op)
        # The target was set on all rows, those that the source raised to their neighbour's rate among them.
        for what, chosen in (("", mine), (", no plateaus", mine.select(~mine.has_flag("plateau")))):
            part = f"{op}, (4, 8) from (2, 8), ≥ 64 MiB{what}"
            scores.append(_score(part, "v100", model, chosen, _CLUSTER_TARGETS[op] if not what else None))
            for arm, terms in (("five terms with NIC sharing", _five_terms), ("alpha-beta line", _line_terms)):
                line = _fit_terms(base.where(op=op), chosen, terms)
                scores.append(score_rows("v100", part, arm, chosen.seconds, line))
    return tuple(scores)


def score_new_groups() -> tuple[Score, ...]:
    """Score group sizes of the NCCL tables that were left out of the fit, per source, and per device and op."""
    tables = load_records("nccl")
    by_vtrain = np.array(["vTrain" in source for source in tables.source])
    return (
        *_score_groups("aiconfigurator", tables.select(~by_vtrain), fitted=(2, 8)),
        *_score_groups("vTrain", tables.select(by_vtrain), fitted=(2, 4, 8)),
    )


def _score_groups(name: str, rows: Records, fitted: tuple[int, ...]) -> list[Score]:
    """Scores over all tables of a file, ≥ 1 MiB, and of the smallest and the largest messages of each table apart."""
    known = np.isin(rows.size("ranks"), fitted)
    seconds: list[Floats] = []
    found: list[Predictions] = []
    lines: list[Floats] = []
    estimated: list[Floats] = []
    labels: list[str] = []
    ends: list[tuple[Floats, Predictions, Floats]] = []
    order = sorted(range(len(rows)), key=lambda index: table_of(rows, index))
    for table, members in groupby(order, key=lambda index: table_of(rows, index)):
        mine = np.array(list(members))
        training, left_out = rows.select(mine[known[mine]]), rows.select(mine[~known[mine]])
        model = fit_collectives(training, topology_of(table[0]))
        refuse_seen("nccl", _seen(model), left_out.row_hashes())
        for op in sorted(set(left_out.op)):
            known_rows, asked = collective_rows(training.where(op=op)), left_out.where(op=op)
            large = known_rows.select(known_rows.size("bytes") >= _MEDIUM_BYTES)
            chosen, end = asked.select(asked.size("bytes") >= _MEDIUM_BYTES), asked.select(_at_ends(asked))
            ends.append((end.seconds, predict_rows(model, end), _fit_terms(known_rows, end, _line_terms)))
            if not len(chosen):
                continue
            seconds.append(chosen.seconds)
            found.append(predict_rows(model, chosen))
            lines.append(_fit_terms(large, chosen, _line_terms))
            estimated.append(estimate_rows(chosen)[0])
            labels += [f"{table[0]} {op}"] * len(chosen)
    measured, ours, line = np.concatenate(seconds), join_predictions(found), np.concatenate(lines)
    groups = ", ".join(map(str, sorted(set(rows.size("ranks").tolist()) - set(fitted))))
    part = f"{name}, groups of {groups} from {', '.join(map(str, fitted))}"
    scores = [
        score_rows("nccl", f"{part}, ≥ 1 MiB", "ours", measured, ours, target=_GROUPS_TARGET, note=_NOTE),
        score_rows("nccl", f"{part}, ≥ 1 MiB", "alpha-beta line", measured, line),
        score_rows("nccl", f"{part}, ≥ 1 MiB", "by datasheet", measured, np.concatenate(estimated)),
    ]
    at_ends, ours_there, line_there = zip(*ends, strict=True)
    measured_there = np.concatenate(at_ends)
    scores += [
        score_rows("nccl", f"{part}, end sizes", "ours", measured_there, join_predictions(ours_there)),
        score_rows("nccl", f"{part}, end sizes", "alpha-beta line", measured_there, np.concatenate(line_there)),
    ]
    places = np.array(labels)
    for label in sorted(set(labels)):
        at = places == label
        scores.append(score_rows("nccl", f"{name}, {label}", "ours", measured[at], ours.select(at)))
        scores.append(score_rows("nccl", f"{name}, {label}", "alpha-beta line", measured[at], line[at]))
    return scores


def _at_ends(rows: Records) -> NDArray[np.bool_]:
    """Which rows are the smallest or the largest message of their number of ranks and dtype."""
    sizes, series = rows.size("bytes"), [*zip(rows.size("ranks").tolist(), rows.dtype, strict=True)]
    ends = {kind: np.array([size for size, own in zip(sizes, series, strict=True) if own == kind]) for kind in series}
    return np.array([size in (ends[own].min(), ends[own].max()) for size, own in zip(sizes, series, strict=True)])


def _seen(model: CollectiveModel) -> NDArray[np.uint64]:
    return np.array([int(text, 16) for text in model.row_hashes], np.uint64)


def _score(part: str, dataset: str, model: CollectiveModel, rows: Records, target: float | None) -> Score:
    return score_rows(dataset, part, "ours", rows.seconds, predict_rows(model, rows), target=target)


def _line_terms(op: CollectiveOp, group: CollectiveGroup) -> tuple[list[float], list[float]]:
    """Terms of the baseline in seconds, and in seconds per byte."""
    return [count_steps(op, group)], [port_share(op, group)]


def _five_terms(op: CollectiveOp, group: CollectiveGroup) -> tuple[list[float], list[float]]:
    through_nic = port_share(op, group)
    return [1.0, count_steps(op, group), float(np.log2(group.num_ranks))], [
        through_nic / group.num_sharing,
        through_nic,
    ]


def _fit_terms(known: Records, asked: Records, terms: Terms) -> Floats:
    """Seconds of the asked rows by a sum of terms, fitted with least squares of relative errors, none negative."""

    def design(rows: Records) -> Floats:
        sizes = rows.size("bytes")
        parts = (terms(op, group) for op, group in zip(rows.op, groups_of(rows), strict=True))
        return np.array(
            [
                [*fixed, *(share * size for share in per_byte)]
                for (fixed, per_byte), size in zip(parts, sizes, strict=True)
            ]
        )

    matrix = design(known) / known.seconds[:, None]
    scale = matrix.max(axis=0)
    fit = LinearRegression(fit_intercept=False, positive=True).fit(matrix / scale, np.ones(len(known)))
    line: Floats = design(asked) @ (fit.coef_ / scale)
    return line
