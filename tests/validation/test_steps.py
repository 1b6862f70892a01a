"""Published steps: what is fitted is never scored, what is reached stays reached, bad rows are named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.prediction import Interval
from meshwright.cost.steps import load_step_model
from meshwright.spec import MeasurementError
from meshwright.validation.datasets import load_records, load_steps
from meshwright.validation.scores import score_rows
from meshwright.validation.splits import refuse_seen
from meshwright.validation.step_cells import MEASURED, PRECISIONS, RECOMPUTES, SCHEDULES, SHARDINGS, SWITCHES
from meshwright.validation.step_model import (
    Residuals,
    fit_steps,
    is_fitted,
    measured_shares,
    predict_cases,
    predict_left_out,
)
from meshwright.validation.step_rows import read_step, row_hash
from meshwright.validation.step_table import LeftOut, list_reasons, read_steps
from meshwright.validation.steps import WITHOUT_SIZE, predict_steps, score_steps


@pytest.fixture(scope="module")
def rows():
    return load_steps()


def named(rows, start):
    return [row for row in rows if row["id"].startswith(start)]


def test_every_row_can_be_read(rows):
    cases, left_out = read_steps([*rows, *load_steps(single_node=True)])
    assert len(cases) == 1014
    assert not left_out


def seconds_of(mine):
    return np.array([float(row["iter_time_s"]) for row in mine])


def test_the_shipped_set_on_korthikanti(rows):
    mine = named(rows, "korth-t5")
    predicted = predict_steps(mine)
    score = score_rows("steps", "Table 5", "ours", seconds_of(mine), predicted)
    assert score.num_rows == 8
    assert score.mape <= 4.0
    assert (predicted.low_s < predicted.seconds).all()
    assert (predicted.seconds < predicted.high_s).all()


def test_korthikanti_without_rows_of_the_same_size(rows):
    mine, model = named(rows, "korth-t5"), load_step_model()
    asked, fitted = read_steps(mine)[0], read_steps([row for row in rows if is_fitted(row)])[0]
    seconds = predict_left_out(asked, fitted, model)
    score = score_rows("steps", "Table 5", "ours", seconds_of(mine), seconds)
    # The targets of 4 and 8 are missed by a little; what is reached must not get worse.
    assert score.mape < 4.2
    assert score.worst < 8.4
    # Rows of the same size, however wrong, say nothing; those of another size do.
    spoiled = [replace(case, measured_s=9 * case.measured_s) if case.shape.hidden == 25600 else case for case in fitted]
    moved = predict_left_out(asked, spoiled, model) != seconds
    assert moved.tolist() == [case.shape.hidden != 25600 for case in asked]
    assert not moved.all()


def test_fitted_rows_are_those_of_the_rule(rows):
    mine = [row for row in rows if is_fitted(row)]
    assert len(mine) == 16
    assert all("2104.04473" in row["source"] and row["precision"] == "fp16 mixed" for row in mine)
    model = load_step_model()
    assert {f"{row_hash(row):016x}" for row in mine} == set(model.fitted_rows)
    seen = np.array([row_hash(row) for row in mine], np.uint64)
    refuse_seen("steps", seen, np.array([row_hash(row) for row in named(rows, "korth")], np.uint64))
    with pytest.raises(MeasurementError, match="1 of 2 rows"):
        refuse_seen("steps", seen, np.array([row_hash(mine[3]), row_hash(named(rows, "korth")[0])], np.uint64))


@pytest.mark.parametrize(
    "edit",
    [
        {"id": "mine", "notes": "measured again", "license": ""},
        {"source": "somebody", "framework": "PyTorch", "model": "x", "cluster": "ours"},
        {"mbs": "", "cp": "1", "vocab": "", "kv_heads": "", "ffn": ""},
        {"device": "A100", "hidden": "12288.0"},
    ],
)
def test_a_fitted_row_in_other_words_is_refused(rows, edit):
    fitted = next(row for row in rows if is_fitted(row) and row["hidden"] == "12288")
    seen = np.array([int(text, 16) for text in load_step_model().fitted_rows], np.uint64)
    edited = {**fitted, **edit, "iter_time_s": fitted["iter_time_s"] + "0"}
    with pytest.raises(MeasurementError, match="1 of 1 rows"):
        refuse_seen("steps", seen, np.array([row_hash(edited)], np.uint64))
    for name, other in (("dp", "3"), ("hidden", "6144"), ("iter_time_s", "1.5"), ("recompute", "none")):
        refuse_seen("steps", seen, np.array([row_hash({**edited, name: other})], np.uint64))


def test_runs_of_different_rows_differ(rows):
    timed = [row for row in rows if row["iter_time_s"]]
    assert len({row_hash(row) for row in timed}) >= len(timed) - 2


def test_the_shipped_model_is_the_fit(rows):
    cases, _ = read_steps([row for row in rows if is_fitted(row)])
    found, shipped = fit_steps(cases, load_step_model()), load_step_model().efficiencies
    assert found.product == pytest.approx(shipped.product, rel=1e-6)
    assert found.memory == pytest.approx(shipped.memory, rel=1e-6)
    assert found.network == pytest.approx(shipped.network, rel=1e-6)


def test_interleaving_that_a_table_leaves_out_is_known(rows):
    chunks = {row["id"]: read_step(row).setup.chunks for row in named(rows, "sc21-t1")}
    assert chunks["sc21-t1-1.7B"] == 1
    assert chunks["sc21-t1-76.1B"] == 3
    assert chunks["sc21-t1-529.6B"] == 3


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("layers", "", "layers: expected a positive whole number"),
        ("layers", "-3", "layers: expected a positive whole number"),
        ("hidden", "nan", "hidden: expected a positive whole number"),
        ("tp", "0", "tp: expected a positive whole number"),
        ("seq", "1e9", "seq: expected a positive whole number"),
        ("gbs_seq", "", "gbs_seq: expected a positive whole number"),
        ("gbs_seq", "7", "gbs_seq: expected mbs"),
        ("device", "TPU v4", "device: expected one of A100"),
        ("family", "rnn", "family: expected one of gpt"),
        ("n_devices", "7", "n_devices: expected tp"),
        ("iter_time_s", "nan", "iter_time_s: expected seconds from 1e-06 to 86400; found"),
        ("iter_time_s", "-1", "iter_time_s: expected seconds from 1e-06 to 86400; found"),
        ("kv_heads", "7", "cannot share"),
        ("ep", "4", "does not divide the 1 devices"),
        ("tp", "7", "n_devices: expected tp"),
        ("layers", "99999999999", "layers: expected at most 10000"),
        ("layers", "7", "at least one layer each"),
        ("pp", "2000", "pp: expected at most 1024; found '2000' \\(line 3\\)"),
        ("iter_time_s", "1e-320", "iter_time_s: expected seconds"),
        ("iter_time_s", "1e300", "iter_time_s: expected seconds"),
        ("status", "derived", "status: expected one of nothing, measured; found 'derived'"),
        ("precision", "fp3", "precision: expected one of nothing, fp16"),
        ("recompute", "maybe", "recompute: expected one of nothing, none"),
        ("schedule", "1F1Bx", "schedule: expected one of nothing, n/a, gpipe"),
        ("zero_or_sharding", "ZeRO-4", "zero_or_sharding: expected one of"),
        ("seq_parallel", "yes", "seq_parallel: expected one of nothing, 0, 1"),
        ("vocab", "many", "vocab: expected a positive whole number"),
        ("vocab", "9" * 5000, "vocab: expected a positive whole number"),
        ("kv_heads", "١٢", "kv_heads: expected a positive whole number"),
        ("cluster", f"{'9' * 5000} Gb/s inter-node", "cluster: expected 1 to 999999 Gb/s"),
        ("cluster", "0 Gb/s inter-node", "cluster: expected 1 to 999999 Gb/s"),
        ("device", "H100-NVL", "device: expected one of A100"),
        ("device", "A100-16GB", "device: expected a variant that is known, such as A100 of 86 GB"),
        ("devices_per_node", "99999999", "devices_per_node: expected at most 1024"),
    ],
)
def test_rows_that_say_too_little_are_named(rows, column, value, reason):
    good = named(rows, "korth-t5-175B-full")[0]
    with pytest.raises(MeasurementError, match=reason):
        predict_steps([good, {**good, column: value}])
    cases, left_out = read_steps([good, {**good, column: value}])
    assert len(cases) == 1
    assert [reason.lines for reason in left_out] == [(3,)]


def test_tables_without_rows_or_columns_are_refused(rows):
    with pytest.raises(MeasurementError, match="no rows"):
        predict_steps([])
    row = {key: value for key, value in rows[0].items() if key not in ("hidden", "tp")}
    with pytest.raises(MeasurementError, match="lacks the columns hidden, tp"):
        predict_steps([row])


def test_rows_without_a_time_can_be_predicted(rows):
    row = {**named(rows, "korth-t5-22B-full")[0], "iter_time_s": ""}
    case = read_step(row)
    assert case.measured_s is None
    assert predict_cases([case], load_step_model()).seconds[0] > 0


@pytest.mark.slow
def test_scores_of_all_parts():
    scores = score_steps()
    by_part = {(score.part, score.arm): score for score in scores}
    ours = "op list and pipeline"
    assert by_part["Korthikanti, Table 5", ours].num_rows == 8
    assert by_part["Korthikanti, Table 5", ours].target is None
    aimed = [(score.arm, score.judged) for score in scores if score.target is not None]
    assert aimed == [(WITHOUT_SIZE, "mape"), (WITHOUT_SIZE, "worst")]
    assert by_part["vTrain, many nodes", ours].num_rows == 50
    assert by_part["vTrain, one node", ours].num_rows == 736
    assert by_part["Zero Bubble", ours].num_rows == 48
    # vTrain's own error on the rows of its set with many nodes (MICRO 2024, abstract).
    assert by_part["vTrain, many nodes", ours].mape < 14.73
    assert all(score.coverage is not None for score in scores if score.target is not None)


def test_shares_of_products_are_those_of_the_kernels():
    kernels = load_records("kernels")
    shipped = load_step_model().product_shares
    found = measured_shares(kernels)
    assert found == {device: pytest.approx(shares) for device, shares in shipped.items()}
    # By hand: of the products of at least 2e11 FLOPs on an A100, half are faster than the share of 312 TFLOP/s.
    mine = kernels.where(op="matmul", device="A100")
    m, n, k = (mine.size(name).astype(float) for name in ("m", "n", "k"))
    rates = 2 * m * n * k / mine.seconds
    large = (2 * m * n * k >= 2e11) & (m >= 1024) & (n >= 1024) & (k >= 1024)
    faster = rates[large] > found["A100"]["bfloat16"] * 312e12
    assert abs(faster.mean() - 0.5) < 0.01
    assert load_step_model().product_scales("A100")["bfloat16"] == 1.0
    assert load_step_model().product_scales("V100") == {}


def test_rows_of_one_paper_or_repository_have_one_origin(rows):
    origins = {read_step(row).origin for row in [*rows, *load_steps(single_node=True)[:3]]}
    assert origins == {
        "arXiv 2104.04473",
        "arXiv 2205.05198",
        "arXiv 2401.10241",
        "VIA-Research/vTrain",
        "mosaicml/llm-foundry",
        "pytorch/torchtitan",
        "MooreThreads/SimuMax",
    }


def test_an_interval_never_looks_at_its_own_origin(rows):
    model = load_step_model()
    fitted = read_steps([row for row in rows if is_fitted(row)])[0][:4]
    others = read_steps([*named(rows, "korth-t5"), *named(rows, "zb-t4-6.2B"), *named(rows, "mpt-1")])[0]
    left_out = np.array([case.measured_s * 1.02 for case in fitted])
    spoiled = [
        replace(case, measured_s=case.measured_s * 10) if case.origin == "arXiv 2205.05198" else case for case in others
    ]
    honest, dishonest = (Residuals(fitted, left_out, cases, model) for cases in (others, spoiled))
    assert honest.intervals("arXiv 2205.05198") == dishonest.intervals("arXiv 2205.05198")
    assert honest.intervals() != dishonest.intervals()
    for interval in honest.intervals().values():
        assert interval.low < interval.high
    # Without anybody else in a regime nothing is claimed but a factor of two.
    assert honest.intervals()["small"] == Interval(low=0.5, high=2.0)


WORDS = {
    "precision": PRECISIONS,
    "recompute": RECOMPUTES,
    "schedule": SCHEDULES,
    "zero_or_sharding": SHARDINGS,
    "seq_parallel": SWITCHES,
    "status": MEASURED,
}


@given(column=st.sampled_from(sorted(WORDS)), data=st.data())
def test_no_word_is_taken_for_another(rows, column, data):
    """A word that is one letter off, cut off or longer is refused, unless it is a word of its own."""
    good = named(rows, "korth-t5-22B-full")[0]
    word = data.draw(st.sampled_from(sorted(WORDS[column])))
    place, letter = data.draw(st.integers(0, len(word))), data.draw(st.characters(codec="utf-8"))
    odd = data.draw(st.sampled_from([word[:place], word[place:], word[:place] + letter + word[place:], word + letter]))
    row = {**good, column: odd}
    known = odd.strip().lower() in WORDS[column]
    cases, left_out = read_steps([row])
    assert known or not cases
    for reason in left_out:
        # A known word may still contradict the rest of the row; then no cell is at fault.
        assert known == (not reason.found)
        assert reason.lines == (2,)
    assert isinstance(row_hash(row), int)


def test_rows_left_out_are_gathered_by_reason(rows):
    good = named(rows, "korth-t5-22B-full")[0]
    odd = [{**good, "layers": str(-index)} for index in range(3000)]
    cases, (layers, heads) = read_steps([good, *odd, {**good, "kv_heads": "7"}], [*range(10, 10 + 3002)])
    assert len(cases) == 1
    assert (len(layers.lines), layers.lines[0], layers.found[1]) == (3000, 11, "-1")
    assert str(layers) == (
        "3000 left out: layers: expected a positive whole number of at most 12 digits; found '0' (line 11), '-1' "
        "(line 12), '-2' (line 13), '-3' (line 14), ..."
    )
    assert str(heads).endswith("where each head has its own.; line 3011")
    many = [LeftOut(reason=f"reason {index}", lines=(index,) * (1 + (index == 15))) for index in range(20)]
    shown = list_reasons(many)
    assert shown[0].startswith("2 left out: reason 15")
    assert shown[12:] == ["8 left out for other reasons"]


COLUMNS = tuple(load_steps()[0])
ODD = ("", "0", "-1", "nan", "1e9", "1e-320", "9" * 12, "9" * 5000, "8", "64", "512", "A100", "cpu", "V100", "moe")
CELLS = st.one_of(st.sampled_from([*ODD, "Interleaved", "1 Gb/s inter-node", "0 Gb/s inter-node"]), st.text(max_size=8))


@given(changes=st.dictionaries(st.sampled_from(COLUMNS), CELLS, min_size=1, max_size=4))
def test_damaged_rows_are_left_out_or_predicted(changes):
    row = {**named(load_steps(), "korth-t5-22B-full")[0], **changes}
    cases, left_out = read_steps([row])
    assert len(cases) + sum(len(reason.lines) for reason in left_out) == 1
    if cases:
        assert 0 < predict_cases(cases, load_step_model()).seconds[0] < float("inf")
