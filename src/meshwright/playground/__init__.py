"""A local page where controls change a plan, and its timeline, memory and step time follow at once.

    Controls (`controls`)  →  base and scenario (`controls`), Plan (`page_layout`; back: `opened_plans`)
                     →  StateResult (`workbench`: balanced cuts, program, costs, simulation)  →  JSON (`service`)

`service` answers paths, `page_server` speaks HTTP on 127.0.0.1, `jobs` refuses foreign requests and searches in the
background.

The views are those of `meshwright.report.page`; the scripts next to this file contain the controls.
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
