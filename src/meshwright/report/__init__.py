"""Present results as tables, Perfetto traces, comparisons and drawn schedules, from `meshwright.spec` types alone.

Functions ``*_rows`` return plain data for ``--json``, ``*_table`` rich renderables for a terminal. `draw_grid` draws
a schedule as text, `write_trace` writes a file for Perfetto, `compare_timelines` compares a prediction with a
measurement. No function here prints.
"""

from meshwright.report.cells import name_schedule_briefly
from meshwright.report.comparison import (
    Comparison,
    InstructionComparison,
    RankComparison,
    SlowRank,
    StepComparison,
    compare_timelines,
    comparison_rows,
    explain_difference,
    explain_stragglers,
    find_stragglers,
    timeline_rows,
)
from meshwright.report.critical_path_text import explanation_rows, explanation_table
from meshwright.report.curve_pictures import draw_curves
from meshwright.report.fit_table import fit_table
from meshwright.report.issue_order import StreamOrder
from meshwright.report.perfetto import check_ranks, write_trace
from meshwright.report.plan_tables import (
    batch_rows,
    describe_latency,
    graph_rows,
    graph_total,
    latency_rows,
    plans_table,
)
from meshwright.report.report_tables import (
    cluster_rows,
    cluster_table,
    comparison_table,
    exchanges_table,
    fit_transfers,
    front_table,
    graph_table,
    make_table,
    measurement_rows,
    measurement_table,
    placement_rows,
    plan_rows,
    plan_table,
    program_rows,
    program_table,
    timeline_table,
)
from meshwright.report.scenario_text import (
    describe_effect,
    describe_factor,
    describe_missing_rates,
    describe_price,
    describe_run,
    describe_scenario,
)
from meshwright.report.schedule_pictures import draw_grid, draw_schedule, draw_slots, explain_slots, schedules_table
from meshwright.report.shares import shares_table
from meshwright.report.workload_text import describe_workload, workload_row

__all__ = [
    "Comparison",
    "InstructionComparison",
    "RankComparison",
    "SlowRank",
    "StepComparison",
    "StreamOrder",
    "batch_rows",
    "check_ranks",
    "cluster_rows",
    "cluster_table",
    "compare_timelines",
    "comparison_rows",
    "comparison_table",
    "describe_effect",
    "describe_factor",
    "describe_latency",
    "describe_missing_rates",
    "describe_price",
    "describe_run",
    "describe_scenario",
    "describe_workload",
    "draw_curves",
    "draw_grid",
    "draw_schedule",
    "draw_slots",
    "exchanges_table",
    "explain_difference",
    "explain_slots",
    "explain_stragglers",
    "explanation_rows",
    "explanation_table",
    "find_stragglers",
    "fit_table",
    "fit_transfers",
    "front_table",
    "graph_rows",
    "graph_table",
    "graph_total",
    "latency_rows",
    "make_table",
    "measurement_rows",
    "measurement_table",
    "name_schedule_briefly",
    "placement_rows",
    "plan_rows",
    "plan_table",
    "plans_table",
    "program_rows",
    "program_table",
    "schedules_table",
    "shares_table",
    "timeline_rows",
    "timeline_table",
    "workload_row",
    "write_trace",
]
