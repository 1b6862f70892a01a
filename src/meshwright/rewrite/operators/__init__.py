"""Operators of rewriting, each declared by one function that defines every element of the result."""

from meshwright.rewrite.operators import elementwise, layout, parallel, products, reductions
from meshwright.rewrite.operators.elementwise import OPERATORS, Operator, operator

__all__ = ["OPERATORS", "Operator", "elementwise", "layout", "operator", "parallel", "products", "reductions"]
