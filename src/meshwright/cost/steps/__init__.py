"""How long a training step of a transformer takes: its ops counted, priced and laid out in a pipeline.

counted     `ops` of a layer and of what stands before and behind them, `convolutions` of a residual network, as
`software` computes them
priced      `prices` by measured kernels and collectives times the figures of a `model`, which `fit` finds; `alone`
while nothing else runs, `pacing` where the host is slower
laid out    `step` for layers and stages, `gradients` for what is exchanged of them, `pipeline` for a closed form
"""

from meshwright.cost.steps.convolutions import residual_ops
from meshwright.cost.steps.counted import CountedOp
from meshwright.cost.steps.fit import PRIOR, fit_efficiencies
from meshwright.cost.steps.model import Regime, StepModel, load_step_model
from meshwright.cost.steps.ops import embedding_ops, head_ops, layer_ops, recomputed_ops
from meshwright.cost.steps.pipeline import StageSeconds, pipeline_seconds
from meshwright.cost.steps.prices import Efficiencies, StepPrices
from meshwright.cost.steps.software import Software, find_software
from meshwright.cost.steps.step import LayerSeconds, StepSeconds, predict_layer, predict_step

__all__ = [
    "PRIOR",
    "CountedOp",
    "Efficiencies",
    "LayerSeconds",
    "Regime",
    "Software",
    "StageSeconds",
    "StepModel",
    "StepPrices",
    "StepSeconds",
    "embedding_ops",
    "find_software",
    "fit_efficiencies",
    "head_ops",
    "layer_ops",
    "load_step_model",
    "pipeline_seconds",
    "predict_layer",
    "predict_step",
    "recomputed_ops",
    "residual_ops",
]
