"""A rank that ran out of memory: its predicted memory, and what to change."""

from __future__ import annotations

from meshwright.cost import CostModel
from meshwright.simulator import form_teams, simulate_plan
from meshwright.spec import MeshwrightError, Plan, load_cluster
from meshwright.spec.plan_files import read_plan
from meshwright.spec.units import format_bytes, format_count
from meshwright.training.job import capture_fake

_HELP = (
    "What helps: smaller microbatches (plan -m), --recompute op or full, --zero 1 to 3, more stages, or fewer ranks on "
    "a host; `meshwright show PLAN` shows what the memory is used for."
)


def predict_memory(plan_file: str, process: int) -> str:
    """The predicted memory of a process, and remedies; or the reason why it cannot be predicted here."""
    try:
        known = _predict(plan_file, process)
    except (MeshwrightError, OSError) as error:
        known = f"Its memory cannot be predicted here: {error}"
    return f"{known} {_HELP}".strip()


def _predict(plan_file: str, process: int) -> str:
    plan = read_plan(plan_file)
    if not isinstance(plan, Plan):
        return ""
    width = plan.sharding.width
    cluster = load_cluster(plan.cluster)
    cost = CostModel(cluster=cluster, precision=plan.workload.precision)
    _, captured = capture_fake(plan)
    local, graph, devices, costs = form_teams(plan, captured.graph, cluster, cost)
    peaks = simulate_plan(local, graph, devices, cost=costs).peak_memory_bytes
    has = cluster.device_kind(process).memory_bytes
    together = ""
    if cluster.device_kind(process).name == "cpu" and plan.num_devices > 1:
        total = sum(peaks) * width
        together = f"; all {format_count(plan.num_devices, 'rank')} together, {format_bytes(total)}"
    return (
        f"Predicted for it were {format_bytes(peaks[process // width])} of {format_bytes(has)}{together}, without the "
        "interpreter and its libraries."
    )
