"""A supervisor in the tests' own process: what it makes of a system that has no room for processes."""

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.serving.server.children import Child
from meshwright.serving.server.supervisor import Supervisor
from meshwright.spec import ServingError, read_deployment
from tests.serving.server.servers import EMULATED

LIMIT_S = 120.0


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_process_that_cannot_be_started_leaves_no_file_open(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/there/is/none")

    async def main():
        child, before = Child("child", ["worker"]), open_files()
        for _ in range(3):
            try:
                await child.start(child.arguments)
            except OSError:
                continue
            raise AssertionError("it was started")
        await asyncio.sleep(0)
        return open_files() - before

    assert asyncio.run(asyncio.wait_for(main(), LIMIT_S)) == 0


@pytest.mark.long
def test_a_bad_token_is_refused_before_a_process_starts(tmp_path):
    (tmp_path / "deployment.toml").write_text(EMULATED)
    (tmp_path / "token").write_text("two words")
    supervisor = Supervisor(read_deployment(tmp_path / "deployment.toml"), token_file=tmp_path / "token")
    with pytest.raises(ServingError, match="expected a token"):
        asyncio.run(asyncio.wait_for(supervisor.run(), LIMIT_S))
    assert supervisor.folder is None
    assert not supervisor.process_ids()


def test_a_process_that_cannot_be_started_again_is_tried_again(tmp_path, monkeypatch):
    (tmp_path / "deployment.toml").write_text(EMULATED)
    deployment = read_deployment(tmp_path / "deployment.toml")
    deployment = replace(deployment, server=replace(deployment.server, port=0, grpc_port=0, admin_port=0))
    told, real = [], sys.executable

    def tell(name, facts):
        if facts["kind"] in ("ended", "unstarted"):
            told.append((name, facts["kind"]))
        if facts["kind"] == "unstarted":
            assert "/there/is/none" in facts["text"]
            if len(told) == 3:
                monkeypatch.setattr(sys, "executable", real)

    async def main():
        supervisor = Supervisor(deployment, told=tell)
        running = asyncio.create_task(supervisor.run())
        try:
            await supervisor.wait_until_ready()
            monkeypatch.setattr(sys, "executable", "/there/is/none")
            os.kill(supervisor.process_ids()["front-0"], signal.SIGKILL)
            while len(told) < 3:
                await asyncio.sleep(0.05)
            await supervisor.wait_until_ready()
        finally:
            supervisor.stop()
            await running

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert told[:3] == [("front-0", "ended"), ("front-0", "unstarted"), ("front-0", "unstarted")]
    assert not [kind for _, kind in told[3:] if kind == "unstarted"]
