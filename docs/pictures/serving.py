"""Draws docs/images/serving.svg: the share of requests in time under four policies, as the load grows.

    python docs/pictures/serving.py

The deployment of examples/deployments/vision.toml for ten seconds at each of nine loads. A test
(tests/docs/test_pictures.py) runs this and compares with the file.
"""

from __future__ import annotations

from pathlib import Path

from meshwright.report import draw_curves
from meshwright.serving import sweep_deployment
from meshwright.simulator.scenarios import read_parameter
from meshwright.spec import read_deployment, write_text

DOCS = Path(__file__).resolve().parent.parent
PICTURE = DOCS / "images" / "serving.svg"
DEPLOYMENT = DOCS.parent / "examples" / "deployments" / "vision.toml"


def draw() -> str:
    """The whole picture as SVG."""
    parameters = [read_parameter("scale=0.6..2.2:9"), read_parameter("policy=adaptive,symphony,clockwork,nexus")]
    sweep = sweep_deployment(parameters, read_deployment(DEPLOYMENT), 10.0)
    title = "Share of requests in time on 8 devices; the staggered bound is at 1.51"
    return draw_curves(sweep.rows, ["scale", "policy"], "in_time_share", title=title)


if __name__ == "__main__":
    write_text(draw(), PICTURE)
    print(f"written: {PICTURE}")
