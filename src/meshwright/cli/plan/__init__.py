"""``meshwright plan``: the request, the search, placements of single ops, and what is printed and written."""
