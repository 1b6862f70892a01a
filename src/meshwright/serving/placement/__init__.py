"""Which device holds which models? Groups of devices for models that do not all fit, or should not.

place        the methods, and what no placement can exceed
heuristics   by equations: squishy bin packing, copies of the most loaded
search       by simulation, as AlpaServe finds them
groups       what has room where, and groups that hold the same
"""

from meshwright.serving.placement.place import PLACE_METHODS, PlacedModels, bound_placed, bound_share, place_models

__all__ = ["PLACE_METHODS", "PlacedModels", "bound_placed", "bound_share", "place_models"]
