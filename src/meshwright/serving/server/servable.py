"""Refuse deployments that only the simulator supports, before a server starts any process.

This module loads policies and therefore numba, which neither frontends nor workers need.
"""

from __future__ import annotations

import math

from meshwright.serving.policies.named import load_policy
from meshwright.serving.policies.nexus import Nexus
from meshwright.serving.policies.sharding.policy import Sharded
from meshwright.serving.policies.shepherd import Shepherd
from meshwright.serving.server.served import served_models
from meshwright.spec import Deployment, ServedModel, Server, ServingError
from meshwright.spec.server import MOST_WORKERS

_FLOATS = ("FP16", "BF16", "FP32", "FP64")


def check_served(deployment: Deployment) -> None:
    """Raise ServingError for a deployment that a server does not support, even if the simulator does."""
    served_models(deployment)
    if deployment.devices > MOST_WORKERS:
        raise ServingError(
            f"The deployment has {deployment.devices} devices; a server has at most {MOST_WORKERS}, as each is a "
            "separate process. Give fewer with --devices; the simulator supports more."
        )
    for model in deployment.models:
        _check_limits(model, deployment.server)
    for what, given in (("queries", deployment.queries), ("trunks", deployment.trunks), ("groups", deployment.groups)):
        if given:
            raise ServingError(
                f"The deployment has {what}, which only the simulator supports: a server's workers hold all models, "
                f"and answer each separately. Remove {what}, or serve each part by a separate deployment."
            )
    policy = load_policy(deployment.policy)
    if deployment.scaling is not None and isinstance(policy, Nexus):
        raise ServingError(
            "Policy nexus plans for all devices one epoch ahead, and does not support scaling. Remove scaling from the "
            "deployment, or choose another policy."
        )
    limit = deployment.device_memory
    if limit is not None and not deployment.has_room(model.name for model in deployment.models):
        raise ServingError(
            "All models together need more than device_memory, and a server's workers hold all of them. Divide them "
            "among several deployments."
        )
    if isinstance(policy, Sharded):
        raise ServingError(
            f"Policy {deployment.policy!r} keeps requests in shards, which a server's single scheduler cannot access. "
            "Serve under 'symphony', which decides the same; the simulator supports this one."
        )
    if isinstance(policy, Shepherd):
        raise ServingError(
            f"Policy {deployment.policy!r} aborts running batches, which no worker can do. Serve under another "
            "policy; the simulator supports this one."
        )


def _check_limits(model: ServedModel, server: Server) -> None:
    """Raise ServingError for a model that no request could use within the server's limits."""
    if model.slo > server.longest_deadline:
        raise ServingError(
            f"Model {model.name!r} has an SLO of {model.slo:g} s, and [server] longest_deadline is "
            f"{server.longest_deadline:g} s, so no request could ask for the SLO. Raise longest_deadline."
        )
    # Least bytes of a value: "0," in JSON or two bytes; one byte for integers (gRPC).
    least = sum(math.prod(item.shape) * (2 if item.datatype in _FLOATS else 1) for item in model.inputs)
    if least > server.body_bytes:
        raise ServingError(
            f"Model {model.name!r}: the inputs of one sample have at least {least} bytes, and [server] body_bytes is "
            f"{server.body_bytes}, so no request could be sent. Raise body_bytes, or make the inputs smaller."
        )
