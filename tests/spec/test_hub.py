"""Ids of the Hugging Face Hub, against a hub of our own on loopback: fetched once, then from the cache."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from meshwright.spec.model_files import MAX_CONFIG_BYTES, is_hub_id

pytest.importorskip("huggingface_hub")

CONFIG = Path(__file__).parents[1] / "zoo" / "configs" / "gpt2.json"


class _Hub(BaseHTTPRequestHandler):
    """Serves one configuration; some repositories are gated, missing or hold none."""

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def _answer(self):
        self.server.paths.append(self.path)
        name = self.path.split("/resolve/")[0].strip("/")
        refused = {
            "acme/gated": (403, "GatedRepo"),
            "acme/none": (401, "RepoNotFound"),
            "acme/empty": (404, "EntryNotFound"),
        }
        status, code = refused.get(name, (200, ""))
        body = b"" if code else self.server.configs.get(name, CONFIG.read_bytes())
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", '"1"')
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    server.paths, server.configs = [], {}
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(10)


def meshwright(folder, port, *arguments):
    env = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(folder), "HF_HUB_DISABLE_XET": "1"}
    env.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", *map(str, arguments)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        env=env,
        cwd=folder,
        check=False,
    )
    return done.returncode, done.stdout, " ".join(done.stderr.split())


def test_a_model_of_the_hub_is_planned_and_read_from_the_cache_from_then_on(hub, tmp_path):
    few = "--zero", "0", "--recompute", "none"
    ask = ("plan", "acme/tiny-gpt", "--cluster", "2xcpu", "--batch", "8", *few, "--json")
    code, out, error = meshwright(tmp_path, hub.server_port, *ask)
    assert code == 0, error
    workload = json.loads(out)["workload"]
    assert workload["model"] == "acme/tiny-gpt"
    assert workload["sequence_length"] == json.loads(CONFIG.read_text())["n_positions"]
    files = [path for path in hub.paths if "/resolve/" in path]
    assert files
    assert all(path.endswith("config.json") for path in files)
    hub.paths.clear()
    assert meshwright(tmp_path, hub.server_port, *ask)[0] == 0
    assert not [path for path in hub.paths if "/resolve/" in path]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("acme/gated", "'acme/gated' is gated"),
        ("acme/none", "no model 'acme/none'"),
        ("acme/empty", "'acme/empty' holds no config.json"),
    ],
)
def test_what_the_hub_refuses_is_said(hub, tmp_path, name, words):
    code, out, error = meshwright(tmp_path, hub.server_port, "plan", name, "--cluster", "2xcpu")
    assert (code, out) == (1, "")
    assert words in error
    assert "Traceback" not in error


def test_without_network_it_says_which_file_to_give(tmp_path):
    # Nothing listens on port 9 of loopback.
    code, _, error = meshwright(tmp_path, 9, "plan", "acme/tiny-gpt", "--cluster", "2xcpu")
    assert code == 1
    assert "http://127.0.0.1:9/acme/tiny-gpt/resolve/main/config.json" in error
    assert "Traceback" not in error


def test_code_in_a_configuration_is_refused(hub, tmp_path):
    hub.configs["acme/own"] = json.dumps({"model_type": "gpt2", "auto_map": {"AutoConfig": "x.y"}}).encode()
    code, _, error = meshwright(tmp_path, hub.server_port, "plan", "acme/own", "--cluster", "2xcpu")
    assert code == 1
    assert "'auto_map' names code of its own" in error


@pytest.mark.parametrize(
    ("reference", "is_id"),
    [
        ("Qwen/Qwen2.5-7B", True),
        ("meta-llama/Llama-3.1-8B", True),
        ("gpt2-small", False),
        ("models/config.json", False),
        ("models/own.py", False),
        ("a/b/c", False),
        ("../own", False),
        ("/etc/hosts", False),
        ("org/", False),
    ],
)
def test_which_references_are_ids(reference, is_id):
    assert is_hub_id(reference) == is_id


def test_a_file_that_is_no_configuration_is_not_fetched(hub, tmp_path):
    hub.configs["acme/large"] = b" " * (MAX_CONFIG_BYTES + 1)
    code, _, error = meshwright(tmp_path, hub.server_port, "plan", "acme/large", "--cluster", "2xcpu")
    assert code == 1
    assert f"configurations are limited to {MAX_CONFIG_BYTES}" in error


def test_a_folder_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("acme/tiny").mkdir(parents=True)
    assert not is_hub_id("acme/tiny")
