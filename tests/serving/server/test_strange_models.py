"""What the code of a model does to the process that it runs in: none of it ends the worker, or cuts it off."""

import json
import time

import pytest

from tests.serving.server.servers import ask_once, infer, serving

OWN = """
import json
import os
import sys

import helper_beside
import torch
from torch import nn

FILES = [open(os.devnull) for _ in range(1100)]


class Own(nn.Module):
    def forward(self, x):
        what = int(x.max())
        if what == 1:
            for kind in ("error", "release", "hire", "stuck", "changed", "worker"):
                print(json.dumps({"kind": kind, "message": "of the user", "device": 0}))
            print("7\\\\n[]\\\\nnull\\\\n" + "much " * 10**6)
        if what == 2:
            sys.exit(0)
        if what == 3:
            raise KeyboardInterrupt
        if what == 4:
            return torch.cat([x, x[:1]])
        if what == 5:
            os._exit(0)
        if what == 6:
            sys.stdout.close()
        return x * helper_beside.FACTOR


def model():
    return Own(), (torch.zeros(1, 3, dtype=torch.int64),)
"""
DEPLOYMENT = """
schema = "meshwright/deployment/1"
devices = 1
policy = "eager"

[[models]]
name = "m"
model = "own.py:model"
slo = "10 s"
latency = { alpha = "1 ms", beta = "2 ms", largest = 16 }
inputs = [{ name = "x", datatype = "INT64", shape = [3] }]

[[models]]
name = "other"
model = "other/own.py:model"
slo = "10 s"
latency = { alpha = "1 ms", beta = "2 ms", largest = 16 }
inputs = [{ name = "x", datatype = "INT64", shape = [3] }]
"""


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_worker_goes_on_whatever_its_models_do(tmp_path):
    (tmp_path / "other").mkdir()
    for folder, factor in ((tmp_path, 3), (tmp_path / "other", 4)):
        (folder / "own.py").write_text(OWN)
        (folder / "helper_beside.py").write_text(f"FACTOR = {factor}\n")
    with serving(tmp_path, DEPLOYMENT) as server:

        def answer(value, name="m"):
            status, document = ask_once(server, infer([(value, 0, 0)], name)[0])
            return document["outputs"][0]["data"][0] if status == 200 else (status, document["error"])

        pid = server.pid("worker-0")
        assert (answer(10), answer(10, "other")) == (30, 40)
        assert answer(1) == 3
        assert answer(2)[0] == answer(3)[0] == answer(4)[0] == 500
        assert answer(6) == 18
        # What it reports is heard: the second failure within a second is not told, and this one is.
        time.sleep(1.1)
        assert answer(2)[0] == 500
        assert (answer(10), answer(10, "other")) == (30, 40)
        assert server.pid("worker-0") == pid
        end = time.monotonic() + 40
        while server.text.count("m failed on a sample: SystemExit: 0") < 2:
            assert time.monotonic() < end, server.text[-2000:]
            time.sleep(0.05)
        assert json.dumps({"kind": "release", "message": "of the user", "device": 0}) in server.text
        # A request that has lost two workers fails.
        assert answer(5)[0] == 500
        end = time.monotonic() + 40
        while server.text.count("worker-0 ended with exit code 0; it is started again") < 2:
            assert time.monotonic() < end, server.text[-2000:]
            time.sleep(0.05)
        assert server.end() == 0
    assert "Traceback" not in server.text
