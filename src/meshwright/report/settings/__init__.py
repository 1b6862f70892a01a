"""Files that start a plan, here or in another system.

`launch_script` and `slurm_script` return scripts that start a plan with `meshwright run`. `export_settings` returns a
plan as settings of another system, with a list of what that system cannot express. `export_orders` returns the orders
of a plan's ranks for torch's pipelining.
"""

from collections.abc import Callable

from meshwright.report.settings.accelerate import export_accelerate
from meshwright.report.settings.deepspeed import export_deepspeed
from meshwright.report.settings.launch_scripts import launch_lines, launch_script, ranks_per_node, slurm_script
from meshwright.report.settings.megatron import export_megatron
from meshwright.report.settings.order_settings import export_orders
from meshwright.report.settings.plan_facts import RegularPlan, gather_facts
from meshwright.report.settings.settings import Settings, Unsaid, notes
from meshwright.report.settings.torchtitan import export_torchtitan
from meshwright.spec import Cluster, Graph, Plan, PlanError, suggest

SYSTEMS: dict[str, Callable[[RegularPlan], Settings]] = {
    "accelerate": export_accelerate,
    "deepspeed": export_deepspeed,
    "megatron": export_megatron,
    "torchtitan": export_torchtitan,
}


def export_settings(system: str, plan: Plan, cluster: Cluster, graph: Graph | None = None) -> Settings:
    """Return a plan as settings of another system (a key of `SYSTEMS`); the graph is needed as in `gather_facts`.

    Raises PlanError for an unknown system, and for a plan that the system cannot express at all.
    """
    if system not in SYSTEMS:
        raise PlanError(f"Settings for {system!r} are not supported{suggest(system, SYSTEMS)}.")
    return SYSTEMS[system](gather_facts(plan, cluster, graph))


__all__ = [
    "SYSTEMS",
    "RegularPlan",
    "Settings",
    "Unsaid",
    "export_orders",
    "export_settings",
    "gather_facts",
    "launch_lines",
    "launch_script",
    "notes",
    "ranks_per_node",
    "slurm_script",
]
