"""Steps of cases by the table that `meshwright measure` wrote; the plans are those that the cases left.

python -m gpu.predict OUT HERE
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from gpu.rows import Case, RowFile

from meshwright.cost import load_cost_model
from meshwright.simulator import simulate_plan
from meshwright.spec import Graph, Plan, load_cluster, read_document


def predict_cases(out: Path, rows: RowFile) -> None:
    """A row for each case whose ops were measured, unless it is there by the same table."""
    table = out / "measurements.json"
    digest = hashlib.sha256(table.read_bytes()).hexdigest()[:12]
    known = {row["job"] for row in rows.read("predicted") if row["table"] == digest}
    done = {row["job"]: row for row in rows.read("done")}
    for name, row in done.items():
        if "model" not in row or name in known:
            continue
        case = Case(model=row["model"], batch=row["batch"], precision=row["precision"])
        if case.measuring not in done:
            continue
        plan = read_document(Plan, out / "plans" / f"{name}.plan.json")
        graph = read_document(Graph, out / "plans" / f"{name}.graph.json")
        cluster = load_cluster(plan.cluster)
        cost = load_cost_model(cluster, table, plan.workload.precision)
        step_s = simulate_plan(plan, graph, cluster, cost=cost).step_time_s
        rows.add("predicted", name, table=digest, predicted_s=step_s)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    predict_cases(folder, RowFile(folder, json.loads(sys.argv[2])))
