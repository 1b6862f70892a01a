"""``meshwright simulate``: the request, and the simulation of a plan, a placement of ops, or a deployment."""
