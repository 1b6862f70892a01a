"""What a server cannot serve, though the simulator can: refused before a process is started.

Policies are loaded here, and with them numba, which neither fronts nor workers need.
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
    """Raise ServingError for what a server cannot do, though the simulator can."""
    served_models(deployment)
    if deployment.devices > MOST_WORKERS:
        raise ServingError(
            f"The deployment has {deployment.devices} devices; a server has at most {MOST_WORKERS}, as each is a "
            "process of its own. Give fewer with --devices; the simulator knows more."
        )
    for model in deployment.models:
        _check_limits(model, deployment.server)
    for what, given in (("queries", deployment.queries), ("trunks", deployment.trunks), ("groups", deployment.groups)):
        if given:
            raise ServingError(
                f"The deployment has {what}, which only the simulator knows: a server's workers all hold all models, "
                f"each answered by itself. Leave {what} out, or serve each part by a deployment of its own."
            )
    policy = load_policy(deployment.policy)
    if deployment.scaling is not None and isinstance(policy, Nexus):
        raise ServingError(
            "Policy nexus plans for all devices, an epoch ahead, and cannot tell how many it needs. Leave scaling out, "
            "or take another policy."
        )
    limit = deployment.device_memory
    if limit is not None and not deployment.has_room(model.name for model in deployment.models):
        raise ServingError(
            "All models together need more than device_memory, and a server's workers hold all of them. Serve some of "
            "them by a deployment of their own."
        )
    if isinstance(policy, Sharded):
        raise ServingError(
            f"Policy {deployment.policy!r} keeps requests in shards, which a server's one scheduler cannot look into. "
            "Serve by 'symphony', which decides the same; the simulator knows this one."
        )
    if isinstance(policy, Shepherd):
        raise ServingError(
            f"Policy {deployment.policy!r} gives batches up while they run, which no worker can do. Serve by another "
            "one; the simulator knows this one."
        )


def _check_limits(model: ServedModel, server: Server) -> None:
    """Raise ServingError for a model that no request can ask within the server's limits."""
    if model.slo > server.longest_deadline:
        raise ServingError(
            f"Model {model.name!r} has an SLO of {model.slo:g} s, and [server] longest_deadline is "
            f"{server.longest_deadline:g} s, so that no request could ask for the SLO. Raise longest_deadline."
        )
    # What a value takes at least: "0," in JSON or two bytes; whole numbers one byte (gRPC).
    least = sum(math.prod(item.shape) * (2 if item.datatype in _FLOATS else 1) for item in model.inputs)
    if least > server.body_bytes:
        raise ServingError(
            f"Model {model.name!r}: the inputs of one sample have at least {least} bytes, and [server] body_bytes is "
            f"{server.body_bytes}, so that no request could come. Raise body_bytes, or make the inputs smaller."
        )
