"""`--trace` and `--trace-ranks` of the verbs that write traces."""

import gzip
import json
from dataclasses import replace

import pytest

from meshwright.spec import Timeline, read_document, write_document

COMPARE = ("compare", "predicted.json", "measured.json")


@pytest.fixture
def planned(run):
    step = ("--batch", "8", "--stages", "2", "-m", "2")
    assert run("plan", "gpt-tiny", "--cluster", "2xcpu", *step, "--out", "plan.json")[0] == 0
    assert run("simulate", "plan.json", "--out", "predicted.json")[0] == 0
    write_document(replace(read_document(Timeline, "predicted.json"), origin="measured"), "measured.json")
    return run


def test_a_rank_is_cut_out_into_a_packed_trace(planned, tmp_path):
    for arguments in (("simulate", "plan.json"), COMPARE):
        planned(*arguments, "--trace", "one.json.gz", "--trace-ranks", "1", code=0)
        events = json.loads(gzip.decompress((tmp_path / "one.json.gz").read_bytes()))["traceEvents"]
        names = {event["args"]["name"].split()[1] for event in events if event["name"] == "process_name"}
        assert names == {"1"}


@pytest.mark.parametrize("ranks", ["", "1-0", "a", "0,", "0-", "-1", "1000000", "0;1", "²"])
def test_what_names_no_ranks_is_refused(planned, ranks):
    assert "0,5-7" in planned("simulate", "plan.json", "--trace", "t.json", f"--trace-ranks={ranks}", code=2)[2]


def test_ranks_need_a_trace_and_have_to_be_there(planned, tmp_path):
    for arguments in (("simulate", "plan.json"), ("run", "plan.json"), COMPARE):
        _, _, err = planned(*arguments, "--trace-ranks", "0", code=2)
        assert "--trace-ranks" in err
        assert "--trace FILE" in err or "without --trace" in err
        # Told before anything is simulated or trained.
        _, _, err = planned(*arguments, "--trace", "t.json", "--trace-ranks", "0, 1-2", code=1)
        assert "Rank 2 was asked for in a trace; the ranks are 0 to 1" in " ".join(err.split())
    assert not (tmp_path / "t.json").exists()
    assert not (tmp_path / "run").exists()
