"""The ranks of the tests of strategies: models in parts and on devices, trained and compared with a serial loop."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from meshwright.capture import capture_model
from meshwright.cost import CostModel
from meshwright.planner.methods.flexflow import SoapResult, place_strategy, soap_space
from meshwright.planner.methods.flexflow.soap_chains import anything
from meshwright.spec import Placement, Workload, decode_document, encode_document, load_cluster
from meshwright.training import prepare
from meshwright.training.split_model import split_source
from meshwright.zoo import load_model
from tests.processes import fork_prepared

BATCH, STEPS = 4, 2
# By name: whether ops are split.
CASES = {"gpt-tiny/devices": False, "gpt-tiny/parts": True, "unet-tiny/parts": True}


def draw(name: str, *, splits: bool, seed: int = 0) -> SoapResult:
    """Any strategy for two devices; its layers are whole unless it ``splits``."""
    cluster, source = load_cluster("2xcpu"), load_model(name, batch_size=BATCH)
    graph = capture_model(
        source.model, source.inputs, targets=source.targets, loss=source.loss, name=name, verify=False
    ).graph
    space = soap_space(graph, cluster, Workload(global_batch=BATCH), CostModel(cluster=cluster), can_run=True)
    candidates, devices = anything(space, np.random.default_rng(seed))
    if not splits:
        candidates = space.soap.candidates[:-1].copy()
    return SoapResult(
        space=space,
        candidates=candidates,
        devices=devices,
        step_s=1.0,
        history=(),
        starts={},
        tally=(0, 0, 0, 0, 0),
        seed=seed,
        wall_s=0.0,
    )


def make_case(name: str, *, splits: bool):
    """The source as it is run, the placement as it comes out of a file, and batches."""
    torch.manual_seed(0)
    source, result = load_model(name, batch_size=BATCH), draw(name, splits=splits)
    graph = result.space.graph
    run = source
    if splits:
        run = split_source(source, result.degrees, "training")
        graph = capture_model(run.model, run.inputs, name=name, verify=False).graph
    placement = replace(place_strategy(result, graph), cluster="2xcpu")
    return source, run, decode_document(Placement, encode_document(placement), "test")


def serial(source) -> dict[str, torch.Tensor]:
    """The state after the same steps in one process."""
    optimizer = torch.optim.AdamW(source.model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        source.compute_loss().backward()
        optimizer.step()
    return source.model.state_dict()


def run_all(cases, out: Path) -> None:
    """Train under each placement; rank 0 writes the largest difference of each tensor's, and what moved."""
    results = {}
    for name, (source, run, placement) in cases.items():
        # What other ranks hold is released from the model that is run.
        alone = replace(source, model=copy.deepcopy(source.model))
        before = {key: value.clone() for key, value in source.model.state_dict().items()}
        make = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)
        trainer = prepare(run.model, run.loss, make, (run.inputs, run.targets), plan=placement, verify=False)
        losses = [trainer.step(run.inputs, run.targets) for _ in range(STEPS)]
        found = trainer.state_dict()
        if found is not None:
            wanted = serial(alone)
            results[name] = {
                "missing": sorted(wanted.keys() - found.keys()),
                "difference": max(float((found[key] - value).abs().max()) for key, value in wanted.items()),
                "moved": max(float((before[key] - value).abs().max()) for key, value in wanted.items()),
                "losses": losses,
                "ops": [sum(len(item.ops) for item in placement.stages if item.rank == rank) for rank in (0, 1)],
            }
    if results:
        out.write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    fork_prepared(
        int(sys.argv[1]),
        lambda: {name: make_case(name.split("/")[0], splits=splits) for name, splits in CASES.items()},
        lambda prepared: run_all(prepared, Path(sys.argv[2])),
    )
