"""Errors of predictions of collectives on public measurements: between sizes, on a larger cluster, in other groups.

    v100    sizes left out in folds: `meshwright.validation.series`; and a cluster never profiled: fitted on two nodes
            of eight V100, scored on the groups of four nodes that cross nodes, 64 MiB and more
    nccl    groups of 4 of NCCL tables of A100, B200, H100, H200 and L40S, fitted on groups of 2 and 8; groups of 3, 5,
            6, 7 of vTrain's all-reduces, fitted on 2, 4 and 8; 1 MiB and more; the smallest and the largest messages of
            each table apart; what ships, asked for tables that it has not seen (`shipped_collectives`); and costs by
            datasheet, with the interval of the other kinds of device (`collective_errors`)

`fit_collectives` sees the training rows alone; no number in it is tuned on others. Its form is another matter: NCCL's
sources, groups inside one node of the V100s and groups of 4 of vTrain's tables (training rows here) settled most of how
the transfer goes, but three choices came after a look at scores of rows that are scored: trees where no ring closes,
the geometric mean of the two groups beside, and one line for all series of a layout (docs/concepts/collectives.md).
Scores that these reach say so.

Baselines, fitted on the same rows by least squares of relative errors with terms that are not negative: the line
α·steps + β·(bytes through the port) of the ring (on the tables fitted on messages of the scored sizes, 1 MiB and more;
for the end sizes on all), and on the cluster five terms with NIC sharing: 1, steps, log₂ n, bytes by the own link,
bytes by the NIC.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from sklearn.linear_model import LinearRegression

from meshwright.cost.collectives import fit_collectives
from meshwright.cost.collectives.algorithms import count_steps, port_share
from meshwright.cost.collectives.fitting import collective_rows, groups_of
from meshwright.cost.prediction import join_predictions
from meshwright.validation.collective_errors import estimate_rows, score_datasheet
from meshwright.validation.collective_rows import predict_rows, table_of, topology_of
from meshwright.validation.datasets import load_records
from meshwright.validation.scores import Score, score_rows
from meshwright.validation.series import OPS, score_series
from meshwright.validation.shipped_collectives import score_shipped
from meshwright.validation.splits import refuse_seen

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from meshwright.cost.collectives import CollectiveGroup, CollectiveModel, CollectiveOp
    from meshwright.cost.prediction import Floats, Predictions
    from meshwright.records import Records

    Terms = Callable[[CollectiveOp, CollectiveGroup], tuple[list[float], list[float]]]

# The project's targets in per cent: of the cluster never profiled by op, of the NCCL tables.
_CLUSTER_TARGETS = {"all_reduce": 12.0, "all_gather": 5.0, "reduce_scatter": 6.0, "all_to_all": 10.0}
_GROUPS_TARGET = 10.0
# What is shown beside a target where the form of the predictor was chosen with a view of these rows.
_NOTE = (
    "form chosen with these rows in view: trees where no ring closes, geometric mean of the groups beside, one line "
    "for all series of a layout"
)
_LARGE_BYTES, _MEDIUM_BYTES = 64 * 2**20, 2**20
# Devices of a node of the V100 cluster.
_PER_NODE = 8


def score_collectives() -> tuple[Score, ...]:
    """All scores of collectives; takes minutes (five folds of five ops)."""
    return (*score_series(), *score_new_cluster(), *score_new_groups(), *score_shipped(), *score_datasheet())


def score_new_cluster() -> tuple[Score, ...]:
    """Four nodes predicted from two: per op, all measured points except plateaus."""
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
    """Group sizes that were left out of the NCCL tables, per file, and per device and op."""
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
