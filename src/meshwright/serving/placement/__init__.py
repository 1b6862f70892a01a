"""Placement of models: groups of devices for models that do not, or should not, all fit on every device.

model_placement   the methods, an upper bound for any placement, and placement by simulation, as in AlpaServe
"""

from meshwright.serving.placement.model_placement import (
    PLACE_METHODS,
    PlacedModels,
    bound_placed,
    bound_share,
    place_models,
)

__all__ = ["PLACE_METHODS", "PlacedModels", "bound_placed", "bound_share", "place_models"]
