"""Rows of batches and the line through them, on the terminal and on the page."""

import io

import pytest
from rich.console import Console

from meshwright.report import batch_rows, describe_latency, latency_rows, measurement_rows, measurement_table
from meshwright.report.page import shown_document
from meshwright.spec import BatchMeasurement, Measurements


def batch(model, batch_size, seconds):
    return BatchMeasurement(
        model=model, batch_size=batch_size, seconds=seconds, p90_s=2 * seconds, p99_s=3 * seconds, num_samples=20
    )


BATCHES = (batch("b", 4, 1.0), batch("a", 4, 0.010), batch("a", 1, 0.004), batch("a", 2, 0.006))
TABLE = Measurements(device="cpu", software="s", date="d", batches=BATCHES)


def test_each_batch_is_a_row_by_model_and_size():
    rows = batch_rows(BATCHES)
    assert [(row["model"], row["batch_size"]) for row in rows] == [("b", 4), ("a", 1), ("a", 2), ("a", 4)]
    assert rows[2] == {
        "model": "a",
        "batch_size": 2,
        "median_s": 0.006,
        "p90_s": 0.012,
        "p99_s": pytest.approx(0.018),
        "samples_per_s": pytest.approx(2 / 0.006),
        "num_measured": 20,
    }


def test_each_model_has_its_line_where_two_sizes_are_known():
    alone, line = latency_rows(BATCHES)
    assert (alone["model"], alone["num_sizes"], alone["alpha_s"], describe_latency(alone)) == ("b", 1, None, "")
    assert (line["smallest_batch"], line["largest_batch"], line["num_sizes"]) == (1, 4, 3)
    assert (line["alpha_s"], line["beta_s"]) == (pytest.approx(0.002), pytest.approx(0.002))
    assert line["largest_error"] == pytest.approx(0.0, abs=1e-9)
    assert describe_latency(line).startswith("l(b) = 2 ms · b + 2 ms; largest relative error ")


def test_the_largest_error_has_its_sign_and_size():
    # Through (1, 1 s) and (2, 2 s) with β = 0; what is at 4 takes twice as long as the line says.
    (row,) = latency_rows([batch("m", 1, 1.0), batch("m", 2, 2.0), batch("m", 4, 8.0)])
    assert (row["beta_s"], row["largest_error_at"]) == (0.0, 4)
    assert row["alpha_s"] == pytest.approx((1 + 1 + 0.5) / (1 + 1 + 0.25))
    assert row["largest_error"] == pytest.approx(row["alpha_s"] * 4 / 8 - 1)
    assert row["largest_error"] < -0.4


def test_a_table_shows_the_lines_of_its_models():
    assert [row["model"] for row in measurement_rows(TABLE)["batches"]] == ["b", "a"]
    console = Console(width=100, file=io.StringIO())
    console.print(measurement_table(TABLE))
    text = console.file.getvalue()
    assert "batches of whole models: l(b) = alpha · b + beta" in text
    assert "transfers" not in text


def test_a_page_shows_the_lines_of_its_models():
    titles = [table["title"] for table in shown_document(TABLE, "m")["tables"]]
    assert titles == ["What was measured", "Batches of whole models: l(b) = alpha · b + beta"]
