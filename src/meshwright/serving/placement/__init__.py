"""Placement of models: groups of devices for models that do not, or should not, all fit on every device.

place     the methods, and an upper bound for any placement
search    placement by simulation, as in AlpaServe
groups    free memory of groups, and groups that hold the same models
"""

from meshwright.serving.placement.model_placement import (
    PLACE_METHODS,
    PlacedModels,
    bound_placed,
    bound_share,
    place_models,
)

__all__ = ["PLACE_METHODS", "PlacedModels", "bound_placed", "bound_share", "place_models"]
