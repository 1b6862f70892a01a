"""Wire layouts: shape, strides and dtype of every tensor sent between stages, known before the first step.

They come from one run of the captured graph with fake tensors, so both ends of a channel (the tensors sent between two
stages) agree without exchanging metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.runtime.local_models import replace_held
from meshwright.runtime.random_state import read_generator
from meshwright.runtime.stage_module import autocasting, laid_out
from meshwright.runtime.transport import WireLayout
from meshwright.spec import Graph, StageSlice

# Ops whose result depends on strides.
_BY_MEMORY = ("aten.as_strided", "aten.set_", "aten.resize")


def channel_layouts(
    graph: Graph,
    make_module: Callable[[tuple[int, ...]], torch.nn.Module],
    stages: Sequence[StageSlice],
    batch_size: int,
    device: torch.device,
    autocast: torch.dtype | None = None,
    *,
    channels_last: bool = False,
) -> dict[tuple[int, int, str], tuple[WireLayout, ...]]:
    """Return layouts by (source stage, target stage, payload) for microbatches of ``batch_size`` samples.

    Payloads are "activation" and "gradient". ``make_module(tensors)`` makes a module that computes these tensors from
    the graph inputs. ``autocast``: the type of torch's autocast. ``channels_last``: images have that memory format.
    """
    channels = [channel for stage in stages for channel in stage.outgoing]
    crossing = tuple(sorted({tensor for channel in channels for tensor in channel.tensors}))
    tensors: dict[int, WireLayout] = {}
    if crossing:
        values = _fake_values(graph, make_module(crossing), batch_size, device, autocast, channels_last=channels_last)
        tensors = dict(zip(crossing, values, strict=True))
    layouts: dict[tuple[int, int, str], tuple[WireLayout, ...]] = {}
    for channel in channels:
        activations = tuple(tensors[tensor] for tensor in channel.tensors)
        state = read_generator(device)
        rng = (WireLayout(tuple(state.shape), state.stride(), state.dtype),) if channel.carries_rng else ()
        layouts[channel.source, channel.target, "activation"] = activations + rng
        layouts[channel.target, channel.source, "gradient"] = tuple(tensors[tensor] for tensor in channel.gradients)
    return layouts


def takes_channels_last(
    graph: Graph,
    make_module: Callable[[tuple[int, ...]], torch.nn.Module],
    batch_size: int,
    device: torch.device,
    autocast: torch.dtype | None = None,
) -> bool:
    """Return whether a graph has convolutions and also runs if images are in channels-last memory format.

    Compiled convolutions are several times as fast in that format. False if a captured view does not fit its strides,
    or if some op reads memory in storage order.
    """
    kinds = [op.kind for op in graph.ops]
    if not any("conv" in kind for kind in kinds) or any(kind.startswith(_BY_MEMORY) for kind in kinds):
        return False
    try:
        _fake_values(graph, make_module(graph.outputs), batch_size, device, autocast, channels_last=True)
    except RuntimeError:
        return False
    return True


def _fake_values(
    graph: Graph,
    module: torch.nn.Module,
    batch_size: int,
    device: torch.device,
    autocast: torch.dtype | None,
    *,
    channels_last: bool,
) -> list[WireLayout]:
    # In a dry run all tensors are already fake, and modes cannot be mixed.
    with detect_fake_mode() or FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        # Tensors on another device, or never allocated.
        replace_held(
            [module], lambda value: value if value.device == device else torch.empty_like(value, device=device)
        )
        inputs = [
            torch.empty(
                [extent.at(batch_size) for extent in graph.tensors[tensor].shape],
                dtype=getattr(torch, graph.tensors[tensor].dtype),
                device=device,
            )
            for tensor in graph.inputs
        ]
        # A copy that preserves the format is dense: expanded dims (stride 0) are not sent.
        with autocasting(device, autocast):
            made = module(*(map(laid_out, inputs) if channels_last else inputs))
        values = [value.clone(memory_format=torch.preserve_format) for value in made]
    return [WireLayout(tuple(value.shape), value.stride(), value.dtype) for value in values]
