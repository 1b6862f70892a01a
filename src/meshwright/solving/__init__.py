"""Integer programs, solved by HiGHS, and components of directed graphs."""

from meshwright.solving.components import strong_components
from meshwright.solving.integer_programs import Optimum, SparseRows, minimise

__all__ = ["Optimum", "SparseRows", "minimise", "strong_components"]
