"""Plans that split ops, under which training is compared with a serial loop: layouts of ranks, and shardings."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.spec import OpPlacement, Sharding
from tests.runtime.cases import OPTIMIZERS, on


class TeamLayout(NamedTuple):
    """Stages with their replicas, the schedule, how ops are split, and the optimizer."""

    stages: tuple
    schedule: str
    split: str
    optimizer: str

    @property
    def key(self):
        """``1-1/1f1b/tensor/sgd``."""
        stages = "-".join("@" + "+".join(map(str, s.ranks)) if isinstance(s, on) else str(s) for s in self.stages)
        return f"{stages}/{self.schedule}/{self.split}/{self.optimizer}"


# Behind a name: every block runs again in the backward, or, with a word behind it, what that names; gradients are
# clipped to a norm; replicas share out states, all of them or in pairs; gradients leave in parts of buckets, in an
# order of their own.
AGAIN = "+again"
CLIP = "+clip"
ZERO = "+zero"
PAIRS = "+pairs"
PARTS = "+parts"
# What is kept on the host, or on drives: states, and, behind them, parameters; what layers keep for backwards.
HOST, NVME, AWAY = "+host", "+nvme", "+parameters"
SAVED = "+activations"
MAX_NORM = 0.2
SPLITS = {
    "whole": Sharding(),
    "tensor": Sharding(tensor=2),
    "sequence": Sharding(tensor=2, sequence_parallel=True),
    "ring": Sharding(context=2),
    "context": Sharding(context=2, context_method="all_gather"),
    "tensor4": Sharding(tensor=4),
    "tensor-context": Sharding(tensor=2, context=2),
    "expert": Sharding(expert=2),
    "expert4": Sharding(expert=4),
    "expert-tensor": Sharding(expert=2, tensor=2),
    "whole-head": Sharding(tensor=2, placements=(OpPlacement(op="head"),)),
}
_THERE_AND_BACK = (on((0,)), on((1,)), on((1,)), on((0,)))
# World size -> (stages, schedule, split).
_LAYOUTS = {
    2: [
        *(((1,), "1f1b", split) for split in ("tensor", "sequence", "ring", "context", "whole-head", "expert")),
        ((1,), "1f1b", "sequence" + AGAIN),
        ((1,), "1f1b", f"sequence{AGAIN}=op"),
        ((1,), "1f1b", f"expert{AGAIN}=op"),
        ((1, 1), "pipedream", f"whole{AGAIN}=op"),
        ((1, 1), "1f1b", "whole" + AGAIN),
        ((1, 1), "pipedream", "whole" + AGAIN),
        ((1,), "1f1b", "sequence" + CLIP),
        ((1, 1), "1f1b", "whole" + CLIP),
        ((2,), "gpipe", "whole" + CLIP),
        ((1,), "1f1b", "expert" + CLIP),
        *(((2,), "1f1b", f"whole{ZERO}{stage}") for stage in (1, 2, 3)),
        ((2,), "1f1b", "whole" + PARTS),
        ((on((0, 1)), on((0, 1))), "interleaved", f"whole{PARTS}{CLIP}"),
        ((2,), "gpipe", f"whole{ZERO}1{CLIP}"),
        ((2,), "1f1b", f"whole{ZERO}3{AGAIN}{CLIP}"),
        *(((2,), "1f1b", f"whole{ZERO}{stage}{AGAIN}=op") for stage in (1, 2, 3)),
        ((on((0, 1)), on((0, 1))), "interleaved", f"whole{ZERO}3"),
        ((on((0, 1)), on((0, 1))), "interleaved", f"whole{ZERO}1"),
        ((1, 1), "1f1b", f"whole{HOST}"),
        ((2,), "1f1b", f"whole{NVME}{CLIP}"),
        *(((2,), "1f1b", f"whole{ZERO}{stage}{HOST}") for stage in (1, 2, 3)),
        ((1,), "1f1b", f"sequence{HOST}"),
        ((1, 1), "1f1b", f"whole{ZERO}3{HOST}{AWAY}"),
        ((on((0, 1)), on((0, 1))), "interleaved", f"whole{ZERO}1{NVME}"),
        ((1, 1), "1f1b", f"whole{SAVED}"),
        ((1, 1), "gpipe", f"whole{AGAIN}=op{SAVED}"),
        ((2,), "1f1b", f"whole{SAVED}{CLIP}"),
        *(((2,), "1f1b", f"whole{ZERO}{stage}{SAVED}") for stage in (1, 2, 3)),
        ((2,), "1f1b", f"whole{ZERO}3{AGAIN}{HOST}{AWAY}{SAVED}"),
        ((on((0, 1)), on((0, 1))), "interleaved", f"whole{HOST}{SAVED}"),
        ((1,), "1f1b", f"sequence{SAVED}"),
        ((1,), "1f1b", f"expert{SAVED}"),
    ],
    4: [
        ((1,), "1f1b", "tensor4"),
        ((1,), "1f1b", "tensor-context"),
        ((2,), "1f1b", "tensor"),
        ((2,), "gpipe", "ring"),
        ((1, 1), "1f1b", "tensor"),
        ((1, 1), "1f1b", "sequence"),
        ((1, 1), "gpipe", "context"),
        ((1, 1), "zb-h1", "tensor"),
        (_THERE_AND_BACK, "zb-v", "sequence"),
        ((1, 1), "pipedream", "tensor"),
        ((1, 1), "pipedream-2bw", "sequence"),
        ((1, 1), "pipedream", "tensor" + AGAIN),
        ((2,), "gpipe", "ring" + AGAIN),
        ((2,), "gpipe", f"ring{AGAIN}=op"),
        ((1, 1), "1f1b", f"tensor{AGAIN}=op"),
        ((1, 1), "1f1b", f"sequence{AGAIN}=full@0,op@1"),
        ((1, 1), "zb-h1", "sequence" + CLIP),
        ((2,), "1f1b", "tensor" + CLIP),
        ((2, 2), "1f1b", "whole" + CLIP),
        ((1,), "1f1b", "tensor-context" + CLIP),
        ((1,), "1f1b", "expert-tensor" + CLIP),
        ((1,), "1f1b", "expert4"),
        ((1,), "1f1b", "expert-tensor"),
        ((2,), "1f1b", "expert"),
        ((1, 1), "1f1b", "expert"),
        ((4,), "1f1b", f"whole{ZERO}3"),
        *(((4,), "1f1b", f"whole{ZERO}{stage}{PAIRS}") for stage in (1, 2, 3)),
        ((4,), "gpipe", f"whole{ZERO}1{PAIRS}{CLIP}"),
        ((4,), "gpipe", f"whole{ZERO}3{AGAIN}{PAIRS}{CLIP}"),
        ((4,), "1f1b", f"whole{ZERO}1{PAIRS}{HOST}"),
        ((4,), "1f1b", f"whole{ZERO}3{PAIRS}{HOST}{AWAY}"),
        ((2, 2), "1f1b", f"whole{ZERO}1"),
        ((2, 2), "1f1b", "whole" + PARTS),
        ((2,), "1f1b", "tensor" + PARTS),
        ((2, 2), "gpipe", f"whole{ZERO}2{CLIP}"),
        ((2, 2), "1f1b", f"whole{ZERO}3{AGAIN}"),
        ((2,), "1f1b", f"tensor{ZERO}1{CLIP}"),
        ((2,), "1f1b", f"tensor{ZERO}2"),
        ((2,), "1f1b", f"sequence{ZERO}3{CLIP}"),
        ((2,), "gpipe", f"ring{ZERO}3"),
        ((2,), "1f1b", f"expert{ZERO}3"),
        ((4,), "1f1b", f"whole{HOST}"),
        ((2, 2), "1f1b", f"whole{HOST}{CLIP}"),
        ((2, 2), "1f1b", f"whole{ZERO}1{NVME}"),
        ((2, 2), "1f1b", f"whole{ZERO}2{HOST}"),
        ((2, 2), "gpipe", f"whole{ZERO}3{NVME}{CLIP}"),
        ((2,), "1f1b", f"sequence{ZERO}1{HOST}{CLIP}"),
        ((1, 1, 1, 1), "zb-h1", f"whole{HOST}"),
        ((2, 2), "1f1b", f"whole{ZERO}3{HOST}{AWAY}{AGAIN}"),
        ((4,), "1f1b", f"whole{ZERO}3{NVME}{AWAY}{CLIP}"),
        ((2,), "1f1b", f"sequence{ZERO}3{HOST}{AWAY}"),
        ((2, 2), "1f1b", f"whole{SAVED}"),
        ((2, 2), "1f1b", f"whole{ZERO}1{NVME}{SAVED}{CLIP}"),
        ((2, 2), "gpipe", f"whole{ZERO}3{AGAIN}{SAVED}"),
        ((1, 1), "1f1b", f"tensor{AGAIN}=op{SAVED}"),
    ],
    # Pipeline, replicas and a split at once.
    8: [
        ((2, 2), "1f1b", "tensor"),
        ((2, 2), "zb-h1", f"sequence{ZERO}1{CLIP}"),
        *(((4, 4), "1f1b", f"whole{ZERO}{stage}{PAIRS}") for stage in (1, 2, 3)),
        ((4,), "1f1b", f"tensor{ZERO}3{PAIRS}{CLIP}"),
        ((4,), "gpipe", f"sequence{ZERO}1{PAIRS}"),
    ],
}
CASES = {
    world: [TeamLayout(*layout, optimizer) for layout in layouts for optimizer in OPTIMIZERS]
    for world, layouts in _LAYOUTS.items()
}
# Of every model, and of those that it is tried with always.
_EXPERTS = ("expert", "expert4", "expert-tensor")


def all_cases(model, world):
    """The layouts that a model takes; eight ranks are for one alone."""
    if world == 8 and model != "gpt":
        return []
    found = [case for case in CASES[world] if (case.split.split("+")[0] in _EXPERTS) == (model == "mixtral")]
    if model == "resnet":
        # Channels are shared out. Replicas have statistics of their own samples, unlike one process.
        found = [case for case in found if case.split.split("+")[0] in ("tensor", "tensor4") and max(case.stages) == 1]
    if model == "gpt-ignoring":
        # Its classes weigh, and may not be shared out.
        found = [case for case in found if case.split.split("+")[0] in ("ring", "context", "whole")]
    if model in ("llama", "mixtral"):
        # Two heads of keys.
        found = [case for case in found if "tensor4" not in case.split]
    if model == "tied":
        # FSDP2 cuts no parameter without dims, and without attention there is no context.
        lacking = (f"{ZERO}2", f"{ZERO}3", "context", "ring")
        found = [case for case in found if not any(word in case.split for word in lacking)]
    return [case for case in found if not (model in ("gpt-tied", "tied") and case.schedule.startswith("pipedream"))]


# The models whose layouts on two ranks `make test` tries: tensor (also of channels), sequence and expert parallelism.
FEW = ("tied", "mixtral", "resnet")


def main_cases(model, world):
    """Those that are always tried: every layout with one optimizer, of one model or another."""
    found = all_cases(model, world)
    if model in ("gpt", "mixtral"):
        return [case for place, case in enumerate(found) if place % 2 == place // 2 % 2]
    if model == "gpt-ignoring":
        return [case for case in found if case.optimizer == "sgd" and case.split in ("ring", "context")]
    if model == "tied":
        kept = ("tensor", "sequence", f"whole{CLIP}", f"sequence{CLIP}", f"whole{PARTS}")
        return [case for case in found if case.optimizer == "sgd" and case.split in kept]
    if model == "resnet":
        return [case for case in found if case.optimizer == "sgd"]
    if model == "gpt-tied":
        kept = ("whole+again", "whole+clip", "whole+zero3", "whole+zero1+pairs", "whole+parts")
        return [case for case in found if case.optimizer == "sgd" and case.split in kept]
    return [case for case in found if case.optimizer == "adamw" and case.split in ("tensor", "sequence", "ring")][:3]
