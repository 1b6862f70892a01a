"""A deployment whose queries and trunks are models like others, which is what everything else is about."""

from __future__ import annotations

from meshwright.serving.query_trees import expand_queries
from meshwright.serving.trunks import expand_trunks
from meshwright.spec import Deployment


def expand_deployment(deployment: Deployment, scale: float = 1.0) -> Deployment:
    """See `query_trees` and `trunks`; a deployment of models alone is given back.

    Queries divide their time as is best at ``scale`` times their rates, which stay what they are.
    """
    return expand_trunks(expand_queries(deployment, scale))
