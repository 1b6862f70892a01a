"""The orders of a plan's ranks as a file for torch.distributed.pipelining.

`_PipelineScheduleRuntime` loads it as it is and adds messages, gathers and sums by itself (torch 2.13, `_load_csv` with
its default format "compute_only").
"""

from __future__ import annotations

from meshwright.report.settings.settings import Settings, Unsaid, describe_axes, unknown_choices
from meshwright.spec import Plan, format_count

VERSION = "2.13"


def export_orders(plan: Plan, text: str, *, num_lines: int, num_pipelines: int, shared_stage: int | None) -> Settings:
    """Return the settings for torch: the file of orders, and a list of what torch does not read from the file.

    ``text`` has ``num_lines`` lines, one per rank of one pipeline; the plan has ``num_pipelines``. ``shared_stage``: a
    stage on several lines, which torch refuses; None without one.
    """
    unsaid = []
    if num_pipelines > 1:
        unsaid.append(
            Unsaid(
                what=f"{num_pipelines} pipelines side by side",
                reason="a file holds one of them; start each with its part of the batch, and sum the gradients of "
                "equal stages",
            )
        )
    if shared_stage is not None:
        unsaid.append(
            Unsaid(
                what=f"replicas of stage {shared_stage}",
                reason="torch expects every stage on one line and refuses this file; `meshwright simulate --schedule` "
                "reads it",
            )
        )
    unsaid += _unsaid_split(plan)
    if plan.workload.kind == "inference":
        unsaid.append(Unsaid(what="inference", reason="the file contains backwards; torch leaves them out in eval"))
    count = plan.num_microbatches // num_pipelines
    return Settings(
        system="torch.distributed.pipelining",
        version=VERSION,
        file_name="orders.csv",
        values={"num_stages": len(plan.stages), "num_ranks": num_lines, "num_microbatches": count},
        text=text,
        start=f"schedule = _PipelineScheduleRuntime(stages, {count}, loss_fn); schedule._load_csv('orders.csv')",
        fill_in=(
            f"stages: those of a rank, PipelineStage(module, index, {len(plan.stages)}, device); line i is rank i of "
            f"{format_count(num_lines, 'rank')}",
        ),
        unsaid=tuple(unsaid),
        has_comments=False,
    )


def _unsaid_split(plan: Plan) -> list[Unsaid]:
    """What the modules of the stages must do themselves: an order states when they compute, not how."""
    items = []
    if not plan.sharding.is_whole:
        items.append(
            Unsaid(
                what=describe_axes(plan.sharding),
                reason=f"a line is what each of {plan.sharding.width} devices does; split the modules of the stages "
                "(parallelize_module, context_parallel), and let a pipeline's ranks be those at one place of the mesh",
            )
        )
    if plan.exchange.zero:
        how = "ZeroRedundancyOptimizer" if plan.exchange.zero == 1 else "fully_shard; torch adds its gathers"
        groups = f" in groups of {plan.exchange.shard_size}" if plan.exchange.shard_size else ""
        items.append(Unsaid(what=f"ZeRO {plan.exchange.zero}{groups}", reason=f"prepare the stages for it ({how})"))
    if plan.recompute:
        items.append(
            Unsaid(
                what=f"{format_count(len(plan.recompute), 'part')} of the model recomputed"
                + (f" but for {format_count(len(plan.keeps), 'op')}" if plan.keeps else ""),
                reason="wrap the modules of the stages (torch.utils.checkpoint)",
            )
        )
    items += [Unsaid(what=what, reason="a file contains the order, and nothing else") for what in unknown_choices(plan)]
    return items
