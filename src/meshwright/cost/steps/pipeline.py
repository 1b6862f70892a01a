"""How long a pipeline of stages takes for one step, in closed form, where stages repeat the same microbatch work.

With p stages of t_i seconds per microbatch (forward and backward, transfers included), t = max t_i, m microbatches and
v chunks of the model per stage:

    GPipe, 1F1B             m·t + (Σ t_i - t)            bubble (p - 1) / m of the work, for equal stages
    interleaved 1F1B        m·t + (Σ t_i - t) / v        bubble (p - 1) / (v·m)
    ZB-1p (= ZB-H1)         m·t + (Σ t_i - t)·(f + b - w) / (f + b + w)
    ZB-2p                   m·t                           bubble 0

Sources: Narayanan et al., SC 2021, section 2.2; Qi et al., ICLR 2024, table 1 (f forward, b input gradients, w weight
gradients).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.cost.transformer import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Seconds of one stage for one microbatch: forward, gradients of inputs, gradients of weights, transfers.

    Once per step: a sum of gradients over its replicas (``sum_s``) and a gather of parameters, each for one of the
    messages in which that happens, and the optimizer.
    """

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float
    transfer_s: float = 0.0
    sum_s: float = 0.0
    gather_s: float = 0.0
    optimizer_s: float = 0.0

    @property
    def seconds(self) -> float:
        """All of a microbatch."""
        return self.forward_s + self.input_gradient_s + self.weight_gradient_s + self.transfer_s


def pipeline_seconds(
    stages: Sequence[StageSeconds], num_microbatches: int, schedule: Schedule = "1f1b", chunks: int = 1
) -> float:
    """Seconds from the first forward to the last backward of one step."""
    slowest = max(stages, key=lambda stage: stage.seconds)
    steady = num_microbatches * slowest.seconds
    fill = sum(stage.seconds for stage in stages) - slowest.seconds
    if schedule == "zb-2p":
        return steady
    if schedule == "zb-1p":
        kept = slowest.seconds - 2 * slowest.weight_gradient_s
        return steady + fill * max(kept, 0.0) / slowest.seconds
    return steady + fill / (chunks if schedule == "interleaved" else 1)
