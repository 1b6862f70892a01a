"""Converters from calls of ATen operators to terms of declared operators.

`declaration` describes converters and what happens to calls that they do not convert.
"""

from meshwright.rewrite.fx.aten_in import elementwise, layout, products, reductions
from meshwright.rewrite.fx.aten_in.declaration import CONVERTERS, IN_PLACE, expected_type

__all__ = ["CONVERTERS", "IN_PLACE", "elementwise", "expected_type", "layout", "products", "reductions"]
