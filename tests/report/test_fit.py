"""Whether a plan fits, rank by rank: groups that add up, alike ranks in one row, the verdict's rank and bytes."""

import io
import re

import pytest
from rich.console import Console

from meshwright.cost.memory import MemoryLimit
from meshwright.planner import NothingFitsError
from meshwright.report import fit_table
from meshwright.report.fit_table import verdict
from meshwright.simulator import simulate_plan
from meshwright.spec import Workload, load_cluster, load_shipped_graph
from tests.planner.searching import search_plans

GIB = 2**30


def row(rank, stage, parts, limit=GIB):
    peak = sum(parts.values())
    return {
        "rank": rank,
        "stages": [stage],
        "fits": peak <= limit,
        "peak_bytes": peak,
        "reserved_bytes": peak,
        "limit_bytes": limit,
        "headroom_bytes": limit - peak,
        "parts_bytes": parts,
    }


def drawn(rows, width=96):
    console = Console(file=io.StringIO(), width=width)
    console.print(fit_table(rows))
    return console.file.getvalue()


PARTS = {
    "parameters": 100 * 2**20,
    "buffers": 1 * 2**20,
    "gradients": 80 * 2**20,
    "optimizer states": 200 * 2**20,
    "gradient buckets": 2 * 2**20,
    "saved activations": 30 * 2**20,
    "received": 4 * 2**20,
    "inputs": 5 * 2**20,
    "sent": 6 * 2**20,
    "workspace": 7 * 2**20,
}


def test_alike_ranks_are_one_row_and_groups_add_up():
    rows = [row(rank, rank // 4, {**PARTS, "workspace": (7 + rank // 4) * 2**20}) for rank in range(8)]
    text = drawn(rows)
    lines = [line.split() for line in text.splitlines() if "MiB" in line and "Fits" not in line]
    assert [line[0] for line in lines] == ["0–3", "4–7"]
    assert " ".join(lines[0][2:]) == "435 MiB 589 MiB 100 MiB 80 MiB 200 MiB 52 MiB 3 MiB"
    assert " ".join(lines[1][2:]) == "436 MiB 588 MiB 100 MiB 80 MiB 200 MiB 53 MiB 3 MiB"
    assert "Fits: 8 ranks; rank 4 has the least to spare: it needs 436 MiB of the 1 GiB allowed." in text
    narrow = drawn(rows, width=80)
    assert [line.split()[2:] for line in narrow.splitlines() if "80 MiB" in line] == [line[2:] for line in lines]


def test_ranks_that_are_not_neighbours_are_one_row_too():
    def names(num_ranks):
        rows = [row(rank, rank % 2, {**PARTS, "inputs": (rank % 2) * 2**20}) for rank in range(num_ranks)]
        return [line.split("  ")[0].strip() for line in drawn(rows).splitlines() if "80 MiB" in line]

    assert names(4) == ["0, 2", "1, 3"]
    assert names(100) == ["0, 2 … 98", "1, 3 … 99"]


def test_a_rank_that_is_over_is_named_with_its_bytes():
    rows = [row(0, 0, PARTS), row(1, 1, {**PARTS, "parameters": 800 * 2**20}), row(2, 2, PARTS)]
    assert (
        verdict(rows) == "Does not fit: 1 of 3 ranks over; rank 1 needs 1.11 GiB, 111 MiB more than the 1 GiB allowed."
    )
    assert "−111 MiB" in drawn(rows)


def test_unequal_memory_is_shown_per_rank():
    text = drawn([row(0, 0, PARTS, limit=GIB), row(1, 0, PARTS, limit=4 * GIB)])
    assert "limit" in text
    assert [line.split()[0] for line in text.splitlines() if "80 MiB" in line] == ["0", "1"]


def test_rows_are_those_of_the_simulation():
    graph = load_shipped_graph("gpt-tiny")
    cluster = load_cluster("3xcpu")
    plans = search_plans(lambda _: graph, cluster, Workload(global_batch=24), num_stages=2, max_plans=3)
    for item in plans.ranked:
        peaks = simulate_plan(item.plan, graph, cluster).peak_memory_bytes
        rows = item.memory_rows()
        assert tuple(found["peak_bytes"] for found in rows) == peaks
        for found in rows:
            assert found["rank"] in item.plan.stages[found["stages"][0]].ranks
            assert sum(found["parts_bytes"].values()) == found["peak_bytes"]
            assert found["headroom_bytes"] == cluster.device_kind(found["rank"]).memory_bytes - found["peak_bytes"]
        # Every part of the simulator has its column.
        drawn(rows)


def test_when_nothing_fits_the_nearest_plan_tells_which_ranks_are_over():
    graph = load_shipped_graph("gpt-tiny")
    with pytest.raises(NothingFitsError) as caught:
        search_plans(
            lambda _: graph, load_cluster("2xcpu"), Workload(global_batch=8), memory=MemoryLimit(num_bytes=8 * 2**20)
        )
    rows = caught.value.nearest.memory_rows()
    tightest = min(rows, key=lambda found: found["headroom_bytes"])
    assert not tightest["fits"]
    over = re.search(r"on rank (\d+) .*?: ([\d.]+) MiB too much", str(caught.value))
    assert int(over[1]) == tightest["rank"]
    assert float(over[2]) == pytest.approx(-tightest["headroom_bytes"] / 2**20, rel=0.01)


def test_a_note_stands_between_the_verdict_and_the_table():
    console = Console(file=io.StringIO(), width=96)
    console.print(fit_table([row(0, 0, PARTS)], note="Op by op, rank 0 allocates 400 MiB."))
    lines = [line.strip() for line in console.file.getvalue().splitlines() if line.strip()]
    assert lines[0].startswith("Fits: ")
    assert lines[1] == "Op by op, rank 0 allocates 400 MiB."
    assert lines[2].startswith("rank stage")
