"""ATen operators as declared ones: by operator, what it is in terms, for arguments that have such a meaning.

A converter gets a `Reader` and the call's arguments by name, and returns one term, or several for several results, or
None where the arguments have no such meaning (an average pool that does not count its padding): then the call stays
opaque. What a converter returns is compared with what torch says of the result; a term of another shape or dtype is
dropped, and the call is opaque, too.
"""

from meshwright.rewrite.fx.aten_in import elementwise, layout, products, reductions
from meshwright.rewrite.fx.aten_in.declaration import CONVERTERS, IN_PLACE, expected_type

__all__ = ["CONVERTERS", "IN_PLACE", "elementwise", "expected_type", "layout", "products", "reductions"]
