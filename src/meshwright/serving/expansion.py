"""A deployment whose queries and trunks are models like others, which is what everything else is about."""

from __future__ import annotations

from meshwright.serving.query_trees import expand_queries
from meshwright.serving.trunks import expand_trunks
from meshwright.spec import Deployment


def expand_deployment(deployment: Deployment) -> Deployment:
    """See `query_trees` and `trunks`; a deployment of models alone is given back."""
    return expand_trunks(expand_queries(deployment))
