"""Models measured op by op on an accelerator that this machine does not have: what mixes devices is left out.

``python -m tests.training.device_worker PRECISION MODEL...`` prints a line of JSON for each model. All tensors are
fake, as in `tests.runtime.accelerator_worker`.
"""

from __future__ import annotations

import json
import sys
from unittest.mock import patch

from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.spec import Measurements
from meshwright.training import device_measuring as measure_device
from meshwright.training.device_measuring import capture_unallocated
from tests.measurement.clocks import FakeClock
from tests.runtime.accelerator_worker import make_device


def main() -> None:
    """Measure every model on batches of two."""
    precision, *models = sys.argv[1:]
    clock = FakeClock(device=make_device())
    empty = Measurements(device="H100", software="torch 0", date="")
    for model in models:
        captured = capture_unallocated(model, (), 2)
        with (
            patch.object(measure_device, "capture_unallocated", lambda *_, made=captured: made),
            patch.object(measure_device, "measure_device_optimizers", lambda *_, **__: ()),
            FakeTensorMode(),
        ):
            run = measure_device.measure_on(clock, empty, model, [2], precisions=[precision], repeats=1)
        issued = sum(row.forward_issue_s > 0 for row in run.table.ops)
        print(json.dumps({"model": model, "rows": len(run.table.ops), "issued": issued, "left_out": run.left_out}))


if __name__ == "__main__":
    main()
