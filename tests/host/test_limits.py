"""Limits of a process, the folder of compiled loops, settings: with real causes where one can be made."""

import json
import subprocess
import sys

import pytest

from meshwright.host.host_checks import UNLIMITED, check_environment, check_limits, check_numba_cache, find_limit
from tests.host.machines import make_host

LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max processes             {processes}               96365                processes
Max open files            {files}                1048576              files
Max locked memory         {locked}              unlimited            bytes
"""


def limits(files="1048576", processes="96365", locked="8388608"):
    return {"/proc/self/limits": LIMITS.format(files=files, processes=processes, locked=locked)}


def statuses(host):
    return {finding.name: finding.status for finding in check_limits(host)}


def test_limits_are_read(tmp_path):
    host = make_host(tmp_path, limits(locked="unlimited"))
    assert find_limit(host, "open files") == 1048576
    assert find_limit(host, "locked memory") == UNLIMITED
    assert set(statuses(host).values()) == {"ok"}


def test_few_files_are_a_note_and_very_few_a_problem(tmp_path):
    assert statuses(make_host(tmp_path / "a", limits(files="1023")))["open files"] == "note"
    assert statuses(make_host(tmp_path / "b", limits(files="255")))["open files"] == "problem"


def test_locked_memory_matters_where_infiniband_is(tmp_path):
    assert statuses(make_host(tmp_path, limits()))["locked memory"] == "ok"
    card = {"/sys/class/infiniband/mlx5_0/": ""}
    assert statuses(make_host(tmp_path, {**limits(), **card}))["locked memory"] == "problem"
    assert statuses(make_host(tmp_path, {**limits(locked="unlimited"), **card}))["locked memory"] == "ok"


def test_limits_that_are_not_told_are_not_known(tmp_path):
    found = {finding.found for finding in check_limits(make_host(tmp_path))}
    assert found == {"not known"}


@pytest.mark.skipif(sys.platform == "win32", reason="no such limits on Windows")
def test_a_process_with_a_low_limit_is_told_so():
    code = (
        "import json, resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))\n"
        "from meshwright.host import Host\n"
        "from meshwright.host.host_checks import check_limits\n"
        "print(json.dumps([finding.as_row() for finding in check_limits(Host())]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    files = next(row for row in json.loads(done.stdout) if row["name"] == "open files")
    assert (files["status"], files["found"]) == ("problem", "at most 128")
    assert "ulimit -n" in files["remedy"]


def test_a_cache_folder_that_cannot_be_made_is_a_note(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    (finding,) = check_numba_cache(make_host(tmp_path, environment={"NUMBA_CACHE_DIR": f"{file}/cache", "HOME": "/"}))
    assert finding.status == "note"
    assert f"{file}/cache cannot be written to" in finding.found


@pytest.mark.long
def test_numba_itself_takes_the_folder_that_is_told(tmp_path):
    """The order of folders is numba's: it caches a function where the check says."""
    folder = tmp_path / "cache"
    (finding,) = check_numba_cache(make_host(tmp_path, environment={"NUMBA_CACHE_DIR": str(folder)}))
    assert (finding.status, finding.found) == ("ok", str(folder))
    (tmp_path / "loop.py").write_text("import numba\n\n@numba.njit(cache=True)\ndef one():\n    return 1\n\none()\n")
    environment = {"NUMBA_CACHE_DIR": str(folder), "PATH": ""}
    subprocess.run([sys.executable, str(tmp_path / "loop.py")], env=environment, timeout=60, check=True)
    assert list(folder.rglob("*.nbi"))


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"OMP_NUM_THREADS": "4096"}, "more threads than"),
        ({"OMP_NUM_THREADS": "many"}, "not a number"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "no GPU is visible"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "nothing overlaps"),
        ({"NUMBA_DISABLE_JIT": "1"}, "slower"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "allocator"),
        ({"NCCL_P2P_DISABLE": "1"}, "fastest link"),
        ({"WORLD_SIZE": "2"}, "torchrun"),
    ],
)
def test_settings_that_change_what_happens_are_notes(tmp_path, environment, words):
    (finding,) = check_environment(make_host(tmp_path, environment=environment))
    assert finding.status == "note"
    assert words in finding.found
    assert next(iter(environment)) in finding.remedy


@pytest.mark.parametrize("environment", [{}, {"OMP_NUM_THREADS": "1"}, {"CUDA_LAUNCH_BLOCKING": "0"}, {"HOME": "/"}])
def test_ordinary_settings_are_not_told(tmp_path, environment):
    (finding,) = check_environment(make_host(tmp_path, environment=environment))
    assert finding.status == "ok"
