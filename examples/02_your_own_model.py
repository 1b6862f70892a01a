"""02  A model of your own: examples/my_model.py is plain PyTorch and knows nothing of Meshwright.

    python examples/02_your_own_model.py

Capture it, search for the best pipeline on two processes, ask why another one is worse, and look at the step.
"""

from dataclasses import replace
from pathlib import Path

from meshwright import Choices, Limits, Problem, Workload, capture_model, load_cluster, search_plans, simulate_plan
from meshwright.report import draw_grid, write_trace
from meshwright.spec import write_document
from meshwright.zoo import load_model

reference = f"{Path(__file__).parent / 'my_model.py'}:build"

# Under fake tensors the model has shapes but no weights, so its size does not matter.
source = load_model(reference, fake=True)
captured = capture_model(source.model, source.inputs, targets=source.targets, loss=source.loss, name="my_model")
for layer in captured.graph.layers:
    print(f"{layer.name:10} {layer.stop - layer.start} ops")

cluster = load_cluster("2xcpu")
plans = search_plans(
    Problem(
        graph_for=lambda _: captured.graph,
        cluster=cluster,
        workload=Workload(global_batch=64),
        model=reference,
        choices=Choices(num_stages=(2,), microbatch_sizes=(8,)),
    ),
    limits=Limits(max_plans=4),
)
print(f"\n{plans.explain()}\n")

# The same plan with its stages cut elsewhere: what would that cost?
first, second = plans.best.plan.stages
moved = replace(plans.best.plan, stages=(replace(first, stop=first.stop - 2), replace(second, start=second.start - 2)))
print(f"Two layers moved to the second stage: {plans.why_not(moved)}\n")

result = simulate_plan(plans.best.plan, captured.graph, cluster)
print(draw_grid(result.timeline))
print("rank 0 at its peak:", {part: size for part, size in result.memory[0].parts.items() if size})

print("written:", write_document(plans.best.plan, "plan.json"))  # for `meshwright simulate` and `meshwright run`
print("written:", write_trace([result.timeline], "predicted.trace.json"))  # for ui.perfetto.dev
