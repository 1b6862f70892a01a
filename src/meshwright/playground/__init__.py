"""The playground: a local web page whose controls change a plan; timeline, memory and step time are updated at once.

The values of all controls are a state (`controls.Controls`). Modules:

* `controls`: a state, its form in a link, and the cluster and scenario that it describes;
* `page_layout`: make the plan of a state; `opened_plans`: find the state of a plan;
* `workbench`: estimate and simulate the plan of a state (`StateResult`);
* `service`: the responses to requests, as JSON and files; `page_server`: HTTP on 127.0.0.1;
* `jobs`: searches in the background, and checks that a request comes from the page.

The diagrams are drawn by `meshwright.report.page`, the controls by the scripts in this folder.
"""

from meshwright.playground.controls import Controls, from_query, state_of_cluster, to_query
from meshwright.playground.opened_plans import state_of_plan
from meshwright.playground.page_server import PlaygroundServer, serve
from meshwright.playground.service import Service
from meshwright.playground.workbench import MeasuredTable, OfferedModel, StateResult, Workbench

__all__ = [
    "Controls",
    "MeasuredTable",
    "OfferedModel",
    "PlaygroundServer",
    "Service",
    "StateResult",
    "Workbench",
    "from_query",
    "serve",
    "state_of_cluster",
    "state_of_plan",
    "to_query",
]
