"""Real runs in labs: the same losses as without, and requests that cannot be met."""

from pathlib import Path

import pytest

from meshwright.cli.main import invoke
from meshwright.emulation.janitor import PREFIX
from meshwright.emulation.quotas import find_cpu_groups
from meshwright.records.parquet import read_records
from meshwright.spec import ClusterError, load_cluster, read_document
from meshwright.training import RunResult, step_measuring
from tests.emulation.clusters import EXAMPLES, cluster_of

LABS = str(EXAMPLES / "two-labs.toml")
PLAN = ["plan", "gpt-tiny", "--cluster", LABS, "--precision", "float32", "--batch", "16", "--out", "plan.json"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.root
@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_losses_are_those_without_emulation(folder, capfd):
    """Two stages with two replicas each: sends between the labs, gradient reductions inside of them."""
    assert invoke([*PLAN, "--stages", "2", "-m", "4", "--schedule", "1f1b"]) == 0
    assert invoke(["run", "plan.json", "--steps", "3", "--here", "--out", "plain"]) == 0
    assert invoke(["run", "plan.json", "--steps", "3", "--emulate", LABS, "--out", "emulated"]) == 0
    plain, emulated = (read_document(RunResult, Path(name) / "result.json") for name in ("plain", "emulated"))
    assert emulated.losses == pytest.approx(plain.losses, rel=1e-6)
    assert not list(find_cpu_groups()[0].glob(f"{PREFIX}*"))
    assert "hostname of the client socket" not in capfd.readouterr().err


@pytest.mark.root
@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_a_measured_cluster_predicts_its_runs(folder, monkeypatch, capsys):
    """Sends take what the links of the file allow; ops take longer by the share of a core; plans use both."""
    monkeypatch.setattr(step_measuring, "_EMULATED_SIZES", (16, 2**18))
    monkeypatch.setattr(step_measuring, "_EMULATED_S", 5.0)
    assert invoke(["measure", "gpt-tiny", "-m", "4", "--repeats", "3", "--emulate", LABS, "--out", "labs.parquet"]) == 0
    rows = read_records("labs.parquet")
    assert set(rows.device) == {"cpu"}
    links = rows.where(kernel="gloo", phase="")
    assert set(links.size("nodes")) == {4}
    send = links.where(op="send")
    for stride, bytes_per_s in ((1, 125e6), (2, 12.5e6 / 2)):  # inside of labs; two at once between them
        found = send.seconds[(send.size("bytes") == 2**18) & (send.size("stride") == stride)]
        assert found == pytest.approx(2**18 / bytes_per_s, rel=1.0)
    assert invoke([*PLAN, "--stages", "2", "-m", "4", "--measurements", "labs.parquet"]) == 0
    capsys.readouterr()
    assert invoke(["run", "plan.json", "--steps", "3", "--emulate", LABS, "--measurements", "labs.parquet"]) == 0
    assert "predicted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (cluster_of((1, 1), (2, 1)), "The nodes of cluster 'made' have unequal numbers of devices."),
        (load_cluster("2xH100"), "has devices H100. Emulated devices are shares of this machine's processors"),
    ],
)
def test_clusters_that_a_table_cannot_describe_are_refused(cluster, message):
    with pytest.raises(ClusterError, match=message):
        step_measuring.measure_emulated(None, [], cluster)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "2"], "--emulate measures all devices of the cluster; leave --ranks out."),
        (["--links"], "--links and --emulate exclude each other"),
        (["--device", "cpu"], "--device was given with --emulate, which chooses its devices itself"),
        (["--out", "table.json"], "table.json"),
    ],
)
def test_options_of_other_measurements_are_refused(folder, options, message, capsys):
    assert invoke(["measure", "--emulate", LABS, *options]) != 0
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.root
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scenario", "jitter", "--emulate", LABS], "effects[0]: an effect of kind 'jitter' cannot be emulated"),
        (["--scenario", "jitter"], "--scenario changes an emulated cluster: give --emulate CLUSTER, too."),
        (["--emulate", "2xcpu"], "The plan uses device 3, and the emulated cluster '2xcpu' has 2 devices."),
        (["--emulate", LABS, "--dry"], "--dry trains nothing and measures no times: leave out --emulate."),
        (["--emulate", "missing.toml"], "missing.toml"),
    ],
)
def test_requests_that_cannot_be_met(folder, options, message, capsys):
    assert invoke([*PLAN, "--stages", "2", "-m", "4", "--schedule", "1f1b"]) == 0
    assert invoke(["run", "plan.json", *options]) != 0
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
