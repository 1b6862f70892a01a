"""Collectives between real ranks: every place once, sizes as they are, rows that the cost model can be fitted on."""

import json
import subprocess
import sys

import numpy as np
import pytest

from meshwright.cost.collectives import fit_collectives
from meshwright.measurement import measure_links
from meshwright.measurement.links import list_places
from meshwright.records import to_measurements
from meshwright.records.parquet import read_records
from meshwright.spec.measurements import TransferKind
from tests.processes import free_port

OPS = set(TransferKind.__args__)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6, 8, 12])
def test_places_are_the_dimensions_of_all_meshes(num_ranks):
    places = list_places(num_ranks)
    assert len({place.groups for place in places}) == len(places)
    grids = [np.arange(num_ranks).reshape(rows, -1) for rows in range(1, num_ranks + 1) if num_ranks % rows == 0]
    expected = {tuple(map(tuple, lines.tolist())) for grid in grids for lines in (grid, grid.T) if lines.shape[1] > 1}
    assert {place.groups for place in places if len(place.groups) * place.num_ranks == num_ranks} == expected
    assert {place.groups for place in places} - expected == {
        (tuple(range(size)),) for size in range(2, num_ranks) if num_ranks % size == 0
    }
    for place in places:
        assert all(np.all(np.diff(ranks) == place.stride) for ranks in place.groups)


@pytest.mark.long
@pytest.mark.distributed
def test_every_collective_of_three_ranks_becomes_rows(warm_ranks):
    found = measure_links(num_ranks=3, sizes=(8, 2**14), budget_s=30.0, timeout_s=100)
    walls = found.where(phase="")
    assert set(walls.op) == OPS
    assert set(walls.device) == {"cpu"}
    assert set(walls.kernel) == {"gloo"}
    # Sizes are rounded up to what the ranks can share: 3 floats, in an all-to-all 9.
    assert set(walls.where(op="all_reduce").size("bytes")) == {12, 16392}
    assert set(walls.where(op="all_to_all").size("bytes")) == {36, 16416}
    assert set(walls.size("devices_per_node")) == {3}
    assert (found.where(phase="host").seconds > 0).all()
    assert fit_collectives(walls).device == "cpu"
    assert {row.kind for row in to_measurements(found, "cpu").transfers} == OPS


@pytest.mark.long
@pytest.mark.distributed
def test_a_series_ends_where_its_share_does(warm_ranks):
    found = measure_links(num_ranks=2, sizes=(16, 2**26), budget_s=0.4, timeout_s=100)
    sends = found.where(op="all_reduce", phase="")
    assert 2**26 not in sends.size("bytes")


@pytest.mark.long
@pytest.mark.distributed
def test_ranks_of_torchrun_on_two_machines(tmp_path, warm_ranks):
    """Two agents of one rank each stand for two machines."""
    code = (
        "from meshwright.measurement.links import measure_links_here\n"
        "from meshwright.records.parquet import write_records\n"
        "found = measure_links_here(sizes=(16, 4096), budget_s=1.0)\n"
        "if found is not None: write_records(found, 'links.parquet')\n"
    )
    (tmp_path / "job.py").write_text(code)
    start = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    meet = ["--rdzv-backend", "c10d", "--rdzv-id", "links", "--rdzv-endpoint", f"localhost:{free_port()}"]
    agents = [
        subprocess.Popen([*start, *meet, "job.py"], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        errors = [agent.communicate(timeout=100)[1].decode() for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], json.dumps(errors)
    walls = read_records(tmp_path / "links.parquet").where(phase="")
    assert set(walls.op) == OPS
    assert (set(walls.size("nodes")), set(walls.size("devices_per_node"))) == ({2}, {1})
