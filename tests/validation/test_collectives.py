"""Scores of collectives: targets that are reached stay reached; arms by hand; nothing scored was seen."""

from dataclasses import replace

import numpy as np
import pytest

from meshwright.cost import CostModel
from meshwright.cost.collectives.datasheet import load_datasheet_errors
from meshwright.cost.collectives.kriging import Points, interpolate
from meshwright.cost.collectives.shipped_fits import load_shipped, widen
from meshwright.cost.costs import Interval, Predictions
from meshwright.spec import MeasurementError, load_cluster
from meshwright.validation import load_records
from meshwright.validation.collectives import (
    fit_datasheet_errors,
    fit_shipped,
    score_datasheet,
    score_new_cluster,
    score_new_groups,
    score_shipped,
)
from meshwright.validation.series import _straight, count_flagged, fold_keys, score_series
from tests.cost.facts import never_measured


def points(sizes, series, key=None):
    """Points of one layout."""
    count = len(sizes)
    return Points(
        size=np.array(sizes, float),
        series=np.array(series),
        layout=np.zeros(count, int),
        ranks=np.full(count, 4.0),
        nodes=np.ones(count),
        key=np.array(key if key is not None else range(count)),
    )


def test_a_line_is_found_between_and_beyond_its_points():
    sizes = np.array([2.0**power for power in range(4, 24)])
    known, seconds = points(sizes, [0] * 20), 2e-5 + 1e-9 * sizes
    asked = np.array([100.0, 3e4, 5e6, 2.0**25])
    found = interpolate(known, seconds, points(asked, [0] * 4))
    assert found.seconds == pytest.approx(2e-5 + 1e-9 * asked, rel=1e-6)
    assert np.isnan(found.left_out).sum() == 2
    assert found.left_out[1:-1] == pytest.approx(seconds[1:-1], rel=1e-6)


def test_a_second_series_halves_the_noise_of_the_first():
    random = np.random.default_rng(3)
    sizes = np.array([2.0**power for power in range(4, 28)])
    truth = 2e-5 + 1e-10 * sizes
    one = truth * np.exp(random.normal(0, 0.05, 24))
    two = truth * np.exp(random.normal(0, 0.05, 24))
    kept = np.arange(24) % 3 != 1
    rows = np.concatenate([sizes[kept], sizes[kept]])
    known = points(rows, [0] * kept.sum() + [1] * kept.sum(), key=[*range(kept.sum())] * 2)
    asked = points(sizes[~kept], [0] * int((~kept).sum()))
    found = interpolate(known, np.concatenate([one[kept], two[kept]]), asked).seconds
    straight = np.interp(sizes[~kept], sizes[kept], one[kept])
    error, other = (np.abs(np.log(arm / truth[~kept])).mean() for arm in (found, straight))
    assert error < 0.75 * other


def test_a_series_that_was_not_measured_is_refused():
    with pytest.raises(MeasurementError, match="no measured size"):
        interpolate(points([1, 2, 4], [0, 0, 0]), np.array([1.0, 2.0, 3.0]), points([3], [1]))


def test_repetitions_of_a_layout_at_one_size_have_one_key():
    rows = load_records("v100")
    rows = rows.select(rows.op != "matmul")
    keys = np.array(fold_keys(rows))
    same = (rows.size("ranks") == 4) & (rows.size("stride") == 1) & (rows.size("bytes") == 2**20)
    assert len({*keys[same]}) == 1
    assert len(set(rows.dtype[same])) == 2
    assert len(set(rows.op[same])) == 4


@pytest.mark.long
def test_a_cluster_that_was_never_profiled():
    scores = {(score.part, score.arm): score for score in score_new_cluster()}
    part = "{}, (4, 8) from (2, 8), ≥ 64 MiB"
    for op, reached in (("all_reduce", 12), ("all_to_all", 10)):
        ours = scores[part.format(op), "ours"]
        assert ours.target == reached
        assert ours.met
        assert ours.mape < scores[part.format(op), "five terms with NIC sharing"].mape
    # the targets of 5 and 6 are missed with the plateaus: what is reached must not get worse
    for op, without, all_rows in (("all_gather", 6, 9), ("reduce_scatter", 6, 10)):
        assert scores[f"{part.format(op)}, no plateaus", "ours"].mape < without
        assert scores[part.format(op), "ours"].mape < all_rows
        assert scores[f"{part.format(op)}, no plateaus", "ours"].target is None
        assert scores[part.format(op), "ours"].num_rows > scores[f"{part.format(op)}, no plateaus", "ours"].num_rows


def test_straight_lines_go_on_beyond_their_ends():
    """With a bend: by hand, the first two points give the line below, the last two the one above."""
    sizes, seconds = np.array([40.0, 10.0, 20.0]), np.array([9.0, 2.0, 3.0])
    found = [_straight(size, sizes, seconds) for size in (0.0, 10.0, 15.0, 30.0, 40.0, 80.0)]
    assert found == pytest.approx([1.0, 2.0, 2.5, 6.0, 9.0, 21.0])


def test_rows_that_are_left_out_are_counted():
    rows = load_records("v100")
    flagged = {op: count_flagged(rows.where(op=op)) for op in sorted(set(rows.op))}
    assert flagged["matmul"] == "of 128 rows 82 are not scored: 2 no-op, 80 plateau"
    assert rows.has_flag("noop").sum() == 688
    assert rows.has_flag("plateau").sum() == 1115


@pytest.mark.long
def test_groups_that_were_left_out():
    scores = {(score.part, score.arm): score for score in score_new_groups()}
    part = "vTrain, groups of 3, 5, 6, 7 from 2, 4, 8, ≥ 1 MiB"
    assert scores[part, "ours"].met
    assert scores[part, "ours"].mape < scores[part, "alpha-beta line"].mape / 2
    assert "with these rows in view" in scores[part, "ours"].note
    part = "aiconfigurator, groups of 4 from 2, 8, ≥ 1 MiB"
    assert scores[part, "ours"].mape < scores[part, "alpha-beta line"].mape / 2
    ends = part.replace("≥ 1 MiB", "end sizes")
    assert scores[ends, "ours"].target is None
    assert scores[ends, "ours"].mape < scores[ends, "alpha-beta line"].mape / 2
    assert scores[ends, "ours"].num_rows < scores[part, "ours"].num_rows
    for device in ("A100", "H100", "H200"):
        assert scores[f"aiconfigurator, {device} all_reduce", "ours"].mape < 10


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sizes_left_out_of_one_fold():
    ours, lines, one_line = score_series(("reduce_scatter",), (0,))[:3]
    assert (ours.arm, lines.arm, one_line.arm) == ("ours", "piecewise linear", "pipeDejavu's line")
    assert ours.mape < lines.mape < one_line.mape
    assert 70 <= ours.coverage <= 90
    assert ours.target == pytest.approx(0.9 * lines.mape)


# --- shipped ---


@pytest.mark.long
def test_the_shipped_models_are_those_of_the_rows():
    shipped, anew = load_shipped(), fit_shipped()
    assert shipped.elsewhere.high == pytest.approx(anew.elsewhere.high, rel=1e-6)
    for mine, theirs in zip(shipped.kinds, anew.kinds, strict=True):
        assert (mine.link_bytes_per_s, mine.software, mine.rows_sha256) == (
            theirs.link_bytes_per_s,
            theirs.software,
            theirs.rows_sha256,
        )
        for one, other in zip(mine.model.series, theirs.model.series, strict=True):
            assert (one.op, one.group, one.sizes) == (other.op, other.group, other.sizes)
            assert one.seconds == pytest.approx(other.seconds, rel=2e-3)


@pytest.mark.long
def test_tables_that_were_not_seen_lie_in_the_interval_and_far_from_the_datasheet():
    scores = score_shipped()
    ours, datasheet = ([score for score in scores if score.arm == arm] for arm in ("ours", "by datasheet"))
    assert len(ours) == len(datasheet) == 13
    for mine, plain in zip(ours, datasheet, strict=True):
        assert mine.mape < plain.mape / 2.5
        assert mine.coverage >= 70
    assert 70 <= np.mean([score.coverage for score in ours]) <= 92


def test_two_errors_widen_an_interval_by_their_squares():
    known = Predictions(seconds=np.ones(1), low_s=np.exp([-0.3]), high_s=np.exp([0.4]), basis=("measured",))
    found = widen(known, Interval(low=np.exp(-0.4), high=np.exp(0.3)))
    assert np.log([found.low_s[0], found.high_s[0]]) == pytest.approx([-0.5, 0.5])
    assert found.basis == ("transferred",)


# --- by datasheet ---


def test_the_shipped_factors_are_those_of_the_rows():
    shipped, anew = load_datasheet_errors(), fit_datasheet_errors(load_records("nccl"), load_records("v100"))
    assert (shipped.devices, shipped.rows_sha256) == (anew.devices, anew.rows_sha256)
    for place in ("inside", "across"):
        for op, scale in getattr(anew, place).items():
            for regime in ("latency", "bandwidth"):
                mine, theirs = getattr(getattr(shipped, place)[op], regime), getattr(scale, regime)
                assert (mine.low, mine.high) == pytest.approx((theirs.low, theirs.high), rel=1e-9)


@pytest.mark.long
def test_the_interval_by_datasheet_holds_devices_on_one_switch_and_nodes_that_it_has_not_seen():
    scores = score_datasheet()
    assert len(scores) == 25
    for score in scores:
        if score.part.split()[0] in ("A100", "B200", "H100", "H200"):
            assert score.coverage >= 75, score
    across = [score.coverage for score in scores if "across four nodes" in score.part]
    assert len(across) == 4
    assert 70 <= np.mean(across) <= 90


def test_costs_by_datasheet_carry_the_shipped_factors():
    cluster, sizes = load_cluster("8xA100"), np.array([1.0, 2.0**30])
    link = replace(cluster.nodes[0].device_link, bandwidth_bytes_per_s=64e9)
    cluster = replace(cluster, nodes=(replace(cluster.nodes[0], device_link=link),))
    cost = CostModel(cluster=never_measured(cluster))
    for op in ("all_gather", "all_reduce", "reduce_scatter", "all_to_all"):
        scale = load_datasheet_errors().inside[op]
        found = cost.predict_collective(op, range(8), sizes)
        # a byte costs the latency alone; of a gibibyte it is a thousandth
        assert found.high_s / found.seconds == pytest.approx([scale.latency.high, scale.bandwidth.high], rel=2e-3)
        assert found.low_s / found.seconds == pytest.approx([scale.latency.low, scale.bandwidth.low], rel=2e-3)
    # a broadcast was not measured: as wide as the widest
    sent = cost.predict_collective("broadcast", range(8), sizes)
    widest = max(scale.bandwidth.high for scale in load_datasheet_errors().inside.values())
    assert sent.high_s[1] / sent.seconds[1] == pytest.approx(widest, rel=2e-3)
    processors = CostModel(cluster=load_cluster("4xcpu")).predict_collective("all_reduce", range(4), sizes)
    assert processors.high_s / processors.low_s == pytest.approx([4.0, 4.0])
