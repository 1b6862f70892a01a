"""``meshwright simulate``: the request, and what is made of a plan, a placement of ops, or a deployment."""
