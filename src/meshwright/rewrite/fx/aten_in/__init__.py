"""Converters from ATen operators to declared ones.

A converter gets a `Reader` and the call's arguments by name, and returns one term, or several for several results, or
None if the arguments have no equivalent (an average pool that does not count its padding): then the call stays opaque.
The result is compared with torch's shape and dtype; a term that differs is dropped, and the call stays opaque, too.
"""

from meshwright.rewrite.fx.aten_in import elementwise, layout, products, reductions
from meshwright.rewrite.fx.aten_in.declaration import CONVERTERS, IN_PLACE, expected_type

__all__ = ["CONVERTERS", "IN_PLACE", "elementwise", "expected_type", "layout", "products", "reductions"]
