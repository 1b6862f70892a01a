"""Expand a deployment: turn its queries and trunks into plain models, the only kind that the other modules handle."""

from __future__ import annotations

from meshwright.serving.query_trees import expand_queries
from meshwright.serving.trunks import expand_trunks
from meshwright.spec import Deployment


def expand_deployment(deployment: Deployment, scale: float = 1.0) -> Deployment:
    """Return the deployment with models in place of queries and trunks (see `query_trees` and `trunks`).

    Queries divide their time as is best at ``scale`` times their rates; the models' rates are not scaled.
    """
    return expand_trunks(expand_queries(deployment, scale))
