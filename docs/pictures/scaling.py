"""Draws docs/images/scaling.svg: the devices that are up over a day of ten minutes, and what the equation asks for.

    python docs/pictures/scaling.py

The deployment of examples/deployments/day.toml. A test (tests/docs/test_pictures.py) runs this and compares with the
file.
"""

from __future__ import annotations

from math import cos, pi
from pathlib import Path

import numpy as np

from meshwright.report import draw_curves
from meshwright.serving import devices_for, load_policy, simulate_deployment
from meshwright.spec import Diurnal, read_deployment, write_text

DOCS = Path(__file__).resolve().parent.parent
PICTURE = DOCS / "images" / "scaling.svg"
DEPLOYMENT = DOCS.parent / "examples" / "deployments" / "day.toml"
SECONDS, STEP = 600, 4


def draw() -> str:
    """The whole picture as SVG."""
    deployment = read_deployment(DEPLOYMENT)
    scaled = simulate_deployment(deployment, load_policy("symphony"), float(SECONDS)).scaled
    served = deployment.models[0]
    day = served.arrivals
    assert scaled is not None
    assert isinstance(day, Diurnal)
    rows = []
    for second in range(0, SECONDS + 1, STEP):
        rate = day.rate - (day.high - day.low) / 2 * cos(2 * pi * second / day.period)
        up = scaled.series[np.searchsorted(scaled.series[:, 0], second, side="right") - 1, 1]
        for name, count in (
            ("that are up", float(up)),
            ("that are staggered", devices_for(served.line, served.slo, rate)),
        ):
            rows.append({"seconds": second, "devices": name, "count": count})
    return draw_curves(rows, ["seconds", "devices"], "count", title="Devices over a day of ten minutes")


if __name__ == "__main__":
    write_text(draw(), PICTURE)
    print(f"written: {PICTURE}")
