"""``show CLUSTER --collectives``: rows are the cost model's, orders those of the links, options are checked."""

import json

import pytest

from meshwright.cost import CostModel
from meshwright.cost.collectives import COLLECTIVE_OPS
from meshwright.cost.collectives.algorithms import ring_seconds
from meshwright.cost.collectives.listing import LISTED_BYTES, MAX_RANKS, list_collectives
from meshwright.spec import ClusterError, load_cluster, write_document
from tests.cost.facts import make_table, transfer_row


def test_rows_are_what_the_cost_model_says(run):
    document = json.loads(run("show", "8xH100", "--collectives", "--ranks", "0,1,2,3", "--json", code=0)[1])
    assert (document["cluster"], document["ranks"], document["limits"]) == ("8xH100", [0, 1, 2, 3], [])
    cost = CostModel(cluster=load_cluster("8xH100"), precision=document["precision"])
    pairs = [(row["collective"], row["num_bytes"]) for row in document["collectives"]]
    assert pairs == [(op, size) for op in COLLECTIVE_OPS for size in LISTED_BYTES]
    for row in document["collectives"]:
        members = (0, 1) if row["collective"] == "send" else (0, 1, 2, 3)
        assert row["time_s"] == cost.collective_seconds(row["collective"], members, row["num_bytes"])
        assert row["low_s"] <= row["time_s"] <= row["high_s"]
        assert row["basis"] == ("roofline" if row["collective"] in ("broadcast", "send") else "transferred")
    # nccl-tests: an all-reduce's bus bandwidth is 2(n-1)/n of bytes per second, no more than its link's
    largest = next(row for row in document["collectives"] if row["num_bytes"] == 2**30)
    assert largest["bus_bandwidth_bytes_per_s"] == pytest.approx(1.5 * 2**30 / largest["time_s"])
    assert largest["bus_bandwidth_bytes_per_s"] < 450e9


def test_the_best_ring_crosses_each_node_once_and_the_limits_are_bytepss():
    listing = list_collectives(CostModel(cluster=load_cluster("4x8xV100")), (0, 8, 1, 9, 16, 24, 17, 25))
    given, ring, tree = listing["orders"]
    assert sorted(ring["ranks"]) == sorted(given["ranks"])
    assert (given["slowest_links"], ring["slowest_links"], tree["slowest_links"]) == (8, 4, 3)
    assert {row["slowest_bytes_per_s"] for row in listing["orders"]} == {3.125e9}
    none, some, all_spare = listing["limits"]
    assert [row["spare"] for row in listing["limits"]] == [0, 2, 4]
    assert none["time_s"] == pytest.approx(ring_seconds(4, 2**30, 0.0, 3.125e9))
    assert all_spare["time_s"] == pytest.approx(2**30 / 3.125e9)
    assert all_spare["time_s"] < some["time_s"] < none["time_s"]


def test_measured_rows_come_first(run, tmp_path):
    rows = [transfer_row("all_reduce", 2, size, 1e-3 + size * 1e-9) for size in LISTED_BYTES]
    table = write_document(make_table(transfers=rows, device="cpu"), tmp_path / "table.json")
    _, out, _ = run("show", "2xcpu", "--collectives", "--measurements", str(table), "--json", code=0)
    measured = [row for row in json.loads(out)["collectives"] if row["collective"] == "all_reduce"]
    assert {row["basis"] for row in measured} == {"measured"}
    assert [row["time_s"] for row in measured] == pytest.approx([1e-3 + size * 1e-9 for size in LISTED_BYTES])


def test_tables_name_the_orders(run):
    _, out, _ = run("show", "2x2xA100", "--collectives", "--ranks", "0,2,1,3", code=0)
    for words in ("all_to_all", "bus bandwidth", "roofline", "best ring", "0 2 3 1", "spare"):
        assert words in out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("gpt-tiny", "--collectives"), "needs a cluster"),
        (("8xA100", "--ranks", "0,1"), "--collectives"),
        (("8xA100", "--collectives", "--ranks", "0,x"), "0,1,2,3"),
        (("8xA100", "--collectives", "--ranks", "0"), "each once"),
        (("8xA100", "--collectives", "--ranks", "0,0"), "each once"),
        (("8xA100", "--collectives", "--ranks", "0,8"), "from 0 to 7"),
        (("8xA100", "--collectives", "--cluster", "8xA100"), "leave --cluster out"),
        (("8xA100", "--collectives", "--program"), "leave --program"),
        (("zoo", "--collectives"), "no other option"),
    ],
)
def test_what_does_not_go_together_is_refused(run, arguments, word):
    _, _, err = run("show", *arguments, code=1)
    assert word in " ".join(err.split())


def test_so_many_ranks_that_an_order_would_take_long_are_refused():
    cluster = load_cluster(f"{MAX_RANKS // 8 + 1}x8xA100")
    with pytest.raises(ClusterError, match="2 to 512"):
        list_collectives(CostModel(cluster=cluster), range(cluster.num_ranks))
