"""Takes docs/images/dashboard.png: the page of a server under load, in headless Chromium.

    python docs/pictures/dashboard.py

Needs chromium and chromedriver. The server has two models that sleep as long as their batches would take, which
are asked in bursts.
"""

from __future__ import annotations

import base64
import contextlib
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.browser.chromium import start_chromium
from tests.processes import free_port

PICTURE = Path(__file__).resolve().parent.parent / "images" / "dashboard.png"
DEPLOYMENT = """
schema = "meshwright/deployment/1"
devices = 4
policy = "adaptive"

[server]
fronts = 2

[[models]]
name = "detector"
slo = "60 ms"
latency = { alpha = "500 us", beta = "10 ms", largest = 64 }
inputs = [{ name = "x", shape = [16] }]
outputs = [{ name = "y", shape = [10] }]
arrivals = { kind = "gamma", rate = 500, shape = 0.2 }

[[models]]
name = "classifier"
slo = "30 ms"
latency = { alpha = "200 us", beta = "5 ms", largest = 64 }
inputs = [{ name = "x", shape = [16] }]
outputs = [{ name = "y", shape = [10] }]
arrivals = { kind = "gamma", rate = 300, shape = 0.2 }
"""
WIDTH = 1240


def take(driver, url: str, seconds: float) -> None:
    """The picture, after the page has been open for so long."""
    driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
    size = {"width": WIDTH, "height": 600, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.get(url)
    time.sleep(seconds)
    height = driver.execute_script("return document.documentElement.scrollHeight")
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": 1}
    picture = driver.execute_cdp_cmd(
        "Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True, "clip": clip}
    )
    PICTURE.write_bytes(base64.b64decode(picture["data"]))
    print(f"written: {PICTURE.name}, {PICTURE.stat().st_size / 1e3:.0f} kB")


def main(seconds: float) -> None:
    port, admin_port = free_port(), free_port()
    program = (sys.executable, "-m", "meshwright", "serve")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        path = Path(folder) / "deployment.toml"
        path.write_text(DEPLOYMENT)
        ports = ("--port", str(port), "--admin-port", str(admin_port))
        server = subprocess.Popen([*program, str(path), *ports], stderr=subprocess.PIPE, text=True)
        stack.callback(server.wait, 60)
        stack.callback(server.terminate)
        assert server.stderr is not None
        while not re.match("Ready", line := server.stderr.readline()):
            assert line, "the server has ended"
        asked = ("load", f"http://127.0.0.1:{port}", "--deployment", str(path), "--seconds", str(seconds + 20))
        load = subprocess.Popen([*program, *asked], stdout=subprocess.DEVNULL)
        stack.callback(load.wait, 60)
        stack.callback(load.terminate)
        driver = start_chromium()
        stack.callback(driver.quit)
        take(driver, f"http://127.0.0.1:{admin_port}/", seconds)
        for entry in driver.get_log("browser"):
            print(entry["message"])


if __name__ == "__main__":
    main(75.0)
