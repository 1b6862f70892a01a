"""Integer programs, by HiGHS, and components of directed graphs."""

from meshwright.solving.components import strong_components
from meshwright.solving.integer_programs import Optimum, Rows, minimise

__all__ = ["Optimum", "Rows", "minimise", "strong_components"]
