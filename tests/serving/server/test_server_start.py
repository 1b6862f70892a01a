"""What a server says of what it cannot do: one paragraph, exit code 1, and nothing is left."""

import fcntl
import os
import re
import socket
import time
import urllib.request
from pathlib import Path

import pytest

from tests.marks import left_to_ci
from tests.serving.server.servers import EMULATED, serving, wait_until_gone

SLOW = """import time, torch
    class Slow(torch.nn.Module):
        def forward(self, x):
            time.sleep(0.05)
            return x
    return Slow(), (torch.zeros(4, 2),)
"""
MODEL = EMULATED[: EMULATED.index("[[models]]")]


def refusal(tmp_path, text, *options, limit_s=60):
    """What is said when a server does not start."""
    with serving(tmp_path, text, *options, is_ready=False) as server:
        begin = time.monotonic()
        code = server.process.wait(limit_s)
        server.reading.join(10)
        assert not list(Path("/dev/shm").glob(f"meshwright-serve-{server.process.pid}-*"))
    errors = server.text.split("error: ")
    assert code == 1, server.text
    assert len(errors) == 2, server.text
    assert "Traceback" not in server.text
    assert "started again" not in server.text
    assert time.monotonic() - begin < limit_s
    return " ".join(errors[1].split())


@pytest.mark.parametrize("option", ["--port", *left_to_ci("--grpc-port", "--admin-port")])
@pytest.mark.matrix
def test_a_port_in_use_is_told(tmp_path, option):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = refusal(tmp_path, EMULATED, option, str(port))
    assert "cannot listen" in text or "Nothing can listen" in text
    assert f"port {port}: Address already in use. Choose another" in text


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("egaer", "There is no policy 'egaer'"),
        ("shepherd", "aborts running batches, which no worker can do"),
        ("sharded:shards=3", "Serve under 'symphony', which decides the same"),
    ],
)
@pytest.mark.matrix
def test_a_policy_that_cannot_serve_is_refused(tmp_path, policy, expected):
    assert expected in refusal(tmp_path, EMULATED, "--policy", policy)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ('[[groups]]\ndevices = 2\nmodels = ["m"]\n', "groups"),
        (
            '[[queries]]\nname = "q"\nslo = "1 s"\nrate = 1.0\n'
            'calls = [{ name = "c", latency = { alpha = "1 ms", beta = "1 ms", largest = 4 } }]\n',
            "queries",
        ),
        (
            '[[trunks]]\nname = "t"\nslo = "1 s"\nlatency = { alpha = "1 ms", beta = "1 ms", largest = 4 }\n'
            'heads = [{ name = "h", rate = 1.0, latency = { alpha = "1 ms", beta = "1 ms", largest = 4 } }]\n',
            "trunks",
        ),
    ],
)
@pytest.mark.long
def test_what_only_the_simulator_knows_is_refused(tmp_path, more, what):
    assert f"The deployment has {what}, which only the simulator supports" in refusal(tmp_path, EMULATED + more)


@pytest.mark.parametrize("token", ["tökén", *left_to_ci("", "\n", "a b", "a\nb", "a\tb", "a" * 20_000)])
@pytest.mark.long
def test_a_token_that_is_none_is_refused(tmp_path, token):
    (tmp_path / "token").write_text(token)
    assert "expected a token" in refusal(tmp_path, EMULATED, "--token-file", str(tmp_path / "token"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("deployment.toml", "not a log of decisions"), *left_to_ci(("nowhere/log", "not a folder"), (".", "is a folder"))],
)
@pytest.mark.long
def test_a_log_that_cannot_be_written_is_told(tmp_path, name, expected):
    assert expected in refusal(tmp_path, EMULATED, "--log", str(tmp_path / name))
    assert "[[models]]" in (tmp_path / "deployment.toml").read_text()


@pytest.mark.parametrize(("host", "expected"), [("", "host is empty"), ("a..b", "Nothing can listen at a..b")])
@pytest.mark.long
def test_a_host_that_is_none_is_told(tmp_path, host, expected):
    assert expected in refusal(tmp_path, EMULATED, "--host", host)


@pytest.mark.long
def test_more_devices_than_processes_are_refused(tmp_path):
    text = EMULATED.replace("devices = 2", "devices = 1_000_000")
    assert "a server has at most 256" in refusal(tmp_path, text)


@pytest.mark.long
def test_a_host_of_ipv6_is_told_as_an_address(tmp_path):
    with serving(tmp_path, EMULATED, "--host", "::1", "--log", "/dev/full", is_ready=False) as server:
        end = time.monotonic() + 60
        while "Ready:" not in server.text:
            assert time.monotonic() < end, server.text
            assert server.process.poll() is None, server.text
            time.sleep(0.05)
        told = re.search(r"http://(\[::1\]:[0-9]+)/v2 and grpc://\[::1\]:[0-9]+;", server.text)
        with urllib.request.urlopen(f"http://{told[1]}/v2/health/ready", timeout=10) as answer:
            assert answer.status == 200
        # Few events are written when the log is closed.
        assert server.end() == 0
    assert "Traceback" not in server.text
    assert server.text.count("cannot be written (No space left on device)") == 1


@pytest.mark.long
def test_models_that_do_not_fit_together_are_refused(tmp_path):
    text = EMULATED.replace("devices = 2", 'devices = 2\ndevice_memory = "3 GiB"')
    text = text.replace('name = "m"', 'name = "m"\ncopies = 2\nmemory = "2 GiB"')
    assert "need more than device_memory" in refusal(tmp_path, text)


@pytest.mark.long
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise ValueError('no weights here')", "no weights here"),
        ("return 1", "expected"),
        (SLOW, "longer than its SLO"),
    ],
)
def test_a_model_that_cannot_be_served_is_told(tmp_path, code, expected):
    (tmp_path / "own.py").write_text(f"def model(batch_size=4):\n    {code}\n")
    text = f'{MODEL}[[models]]\nname = "m"\nslo = "20 ms"\nmodel = "own.py:model"\n'
    assert expected in refusal(tmp_path, text)


@pytest.mark.long
def test_a_reference_that_names_nothing_is_told(tmp_path):
    text = f'{MODEL}[[models]]\nname = "m"\nslo = "20 ms"\nmodel = "resnet51"\n'
    assert "resnet51" in refusal(tmp_path, text)


@pytest.mark.long
def test_a_worker_that_dies_while_it_loads_is_told_and_started_again_ever_later(tmp_path):
    (tmp_path / "own.py").write_text("import os\n\ndef model(batch_size=4):\n    os._exit(7)\n")
    text = f'{MODEL}[[models]]\nname = "m"\nslo = "20 ms"\nmodel = "own.py:model"\n'.replace("= 2", "= 1")
    with serving(tmp_path, text, is_ready=False) as server:
        end = time.monotonic() + 60
        while server.text.count("worker-0 ended with exit code 7; it is started again.") < 2:
            assert time.monotonic() < end, server.text
            assert server.process.poll() is None, server.text
            time.sleep(0.05)
        assert server.end() == 0
    assert "Ready" not in server.text


def test_a_server_that_is_stopped_while_it_starts_leaves_nothing(tmp_path):
    for pause_s in (0.3, 0.8, 1.2):
        with serving(tmp_path, is_ready=False) as server:
            time.sleep(pause_s)
            children = _children(server.process.pid)
            server.process.terminate()
            code = server.process.wait(30)
            # Before it can hear the signal it ends by it.
            assert code in (0, -15, 1)
            wait_until_gone(children)
            assert not list(Path("/dev/shm").glob(f"meshwright-serve-{server.process.pid}-*"))


def _children(pid):
    found = []
    for each in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(each.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(each.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.long
def test_a_folder_that_was_left_is_removed_and_one_of_another_server_is_not(tmp_path):
    gone = os.fork()
    if gone == 0:
        os._exit(0)
    os.waitpid(gone, 0)
    left, other, foreign = (
        Path(f"/dev/shm/meshwright-serve-{pid}-{name}")
        for pid, name in ((gone, "left"), (os.getpid(), "here"), (gone, "container"))
    )
    for folder in (left, other, foreign):
        folder.mkdir()
        (folder / "slab-1-1-0").write_bytes(b"0")
    lock = os.open(foreign, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        with serving(tmp_path) as server:
            assert not left.exists()
            assert other.exists()
            assert foreign.exists()
            assert server.end() == 0
        assert other.exists()
    finally:
        os.close(lock)
        for folder in (left, other, foreign):
            (folder / "slab-1-1-0").unlink(missing_ok=True)
            if folder.exists():
                folder.rmdir()
