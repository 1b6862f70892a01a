"""Labs need cgroups beside the rights of root, and a container may have the one without the other."""

from __future__ import annotations

import os

import pytest

from meshwright.emulation.quotas import CpuGroups, find_cpu_groups
from meshwright.spec import RunError


@pytest.fixture(autouse=True)
def _groups(request):
    if request.node.get_closest_marker("root") is None:
        return
    try:
        groups = CpuGroups(*find_cpu_groups(), f"meshwright-probe-{os.getpid()}")
        groups.make(1)
        groups.limit(0, 0.5)
        groups.remove()
    except (RunError, OSError) as error:
        pytest.skip(f"processor time cannot be limited here: {error}")
