"""Placement of models: assign models to groups of devices, if not every device can or should hold all models.

model_placement   methods of placement, and an upper bound for any placement
"""

from meshwright.serving.placement.model_placement import (
    PLACE_METHODS,
    PlacedModels,
    bound_placed,
    bound_share,
    place_models,
)

__all__ = ["PLACE_METHODS", "PlacedModels", "bound_placed", "bound_share", "place_models"]
