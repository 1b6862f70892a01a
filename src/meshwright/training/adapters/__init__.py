"""Training loops of other libraries under a plan: `transformers.Trainer` and Lightning's `Trainer`.

    PlannedTrainer, trainer_step        pip install 'meshwright[torch,trainer]'
    PlannedStrategy, lightning_step     pip install 'meshwright[torch,lightning]'

The libraries are optional: each name is loaded from its module when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from meshwright.extras import explain_missing, missing_of

# Name → its module, and the extra that installs the module's dependencies.
_NAMES = {
    "PlannedTrainer": ("hf_trainer", "torch,trainer"),
    "trainer_step": ("hf_trainer", "torch,trainer"),
    "PlannedStrategy": ("lightning", "torch,lightning"),
    "lightning_step": ("lightning", "torch,lightning"),
}

__all__ = ["PlannedStrategy", "PlannedTrainer", "lightning_step", "trainer_step"]


def __getattr__(name: str) -> Any:
    """Load a name from its module; ImportError, with the pip line, if a library that it needs is missing."""
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, extra = _NAMES[name]
    try:
        value = getattr(import_module(f"{__name__}.{module}"), name)
    except ImportError as error:
        if not (missing := missing_of(error)):
            raise
        raise ImportError(explain_missing(name, missing, extra), name=missing) from error
    globals()[name] = value
    return value
