"""The table of placements beside DTensor: what it says of every operator, torch's own propagation says too.

Every call runs on DTensors of one rank of two under the fake process group. A layout of the inputs is DTensor's own if
it neither redistributes an input (adding a sum's part of nothing, as for a bias, is none) nor exchanges anything.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor._dispatch as dispatch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.program.sharding.dims import OpSplit, gradient_is_sum, op_dims
from meshwright.program.sharding.placement_table import operator_rows
from tests.program.operator_cases import CASES, UNARY

SIZE = 2
ATTENTION = "scaled_dot_product_attention"
# What we split and DTensor does not, by operator, and why we may.
OURS = {
    "conv": "DTensor's convolution knows samples alone; channels are columns and rows as those of any product",
    "group_norm": "DTensor splits samples alone; groups of channels are normalised by themselves",
    "chunk": "DTensor gathers a dim that is cut; of columns of parameters every rank can have a share of each part",
    "split": "as chunk",
    "cat": "the other way round: parts that are split alike, beside each other",
    "batch_norm": "DTensor has no channels of it; they are normalised by themselves",
    "gather": "DTensor sums up gradients whole that we sum up in parts and complete then",
    "index_select": "as gather",
    "index": "as gather",
    "expand": "DTensor expands on every rank what it may cut locally",
    "expand_as": "as expand",
    "broadcast_tensors": "as expand",
    "tril": "DTensor's samples of matrices: not registered",
    "triu": "as tril",
    "new_zeros": "made where it is needed; DTensor asks the tensor that it is called on",
    "new_empty": "beside the tensor that it is called on; DTensor knows its own size alone",
    "new_ones": "as new_empty",
    "bincount": "counts of parts add up, as those of histc; DTensor has none",
}
# What DTensor splits and we do not, and why not.
THEIRS = {
    "conv": "its results along width are not those of one device",
    "amax": "sums are the only parts that we complete",
    "linalg_vector_norm": "as amax",
    "type_as": "the second input is not read, however it lies",
    "expand_as": "as type_as",
    "broadcast_tensors": "outputs that lie each as its own input",
    "new_zeros": "as type_as",
    "new_empty": "as type_as",
    "new_ones": "as type_as",
}


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=SIZE)
    yield init_device_mesh("cpu", (SIZE,))
    dist.destroy_process_group()


@pytest.fixture
def redistributed(monkeypatch):
    """Targets of all redistributions of a call but those to parts of a sum."""
    found = []
    original = dispatch.redistribute_local_tensor

    def record(tensor, current, target, *rest, **named):
        if not isinstance(target.placements[0], Partial):
            found.append(target.placements)
        return original(tensor, current, target, *rest, **named)

    monkeypatch.setattr(dispatch, "redistribute_local_tensor", record)
    return found


def shown(placement) -> str:
    """``S1``, ``S1/3`` in three parts, ``R``, or ``P`` whatever the parts are of."""
    if isinstance(placement, _StridedShard):
        return f"S{placement.dim}/{placement.split_factor}"
    return f"S{placement.dim}" if isinstance(placement, Shard) else "R" if isinstance(placement, Replicate) else "P"


def in_words(place: tuple[int, int] | None, otherwise: str = "R") -> str:
    if place is None:
        return otherwise
    return f"S{place[0]}" + (f"/{place[1]}" if place[1] > 1 else "")


def our_splits(case) -> dict[tuple[str, ...], tuple[tuple[str, ...], tuple[str, ...]]]:
    """Layouts of the inputs → those of the outputs and of the inputs' gradients, for every label."""
    inputs = case.tensors()
    outputs = as_tuple(case.call(*inputs))
    dims = op_dims(case.kind, case.attributes, *(tuple(tuple(t.shape) for t in ts) for ts in (inputs, outputs)))
    labels = {label for item in (*dims.inputs, *dims.outputs) for factors in item for label, _ in factors}
    found = {}
    for label in labels - dims.fixed - dims.inner:
        split = OpSplit(label)
        summed = "R" if dims.in_outputs(label) else "P"
        read = tuple(in_words(dims.place_in(item, split)) for item in dims.inputs)
        made = tuple(in_words(dims.place_in(item, split), summed) for item in dims.outputs)
        product = operator_rows()[case.operator].product
        sums = (
            t.is_floating_point() and gradient_is_sum(dims, i, split, product=product) for i, t in enumerate(inputs)
        )
        found[read] = made, tuple("P" if s else given for s, given in zip(sums, read, strict=True))
    return found


def as_tuple(made) -> tuple[torch.Tensor, ...]:
    return tuple(made) if isinstance(made, tuple | list) else (made,)


def placement_of(word: str):
    if word == "R":
        return Replicate()
    dim, _, parts = word[1:].partition("/")
    return _StridedShard(int(dim), split_factor=int(parts)) if parts else Shard(int(dim))


def local_part(tensor: torch.Tensor, word: str) -> torch.Tensor:
    """Rank 0's part."""
    if word == "R":
        return tensor
    dim, _, parts = word[1:].partition("/")
    pieces = (piece.chunk(SIZE, int(dim))[0] for piece in tensor.chunk(int(parts or 1), int(dim)))
    return torch.cat(list(pieces), int(dim)).contiguous()


def their_layouts(case, words, mesh, redistributed):
    """How DTensor lays out outputs and gradients; None where it has to redistribute for it, or refuses."""
    inputs = []
    for tensor, word in zip(case.tensors(), words, strict=True):
        local, shape, stride = local_part(tensor, word), tensor.shape, tensor.stride()
        made = DTensor.from_local(local, mesh, [placement_of(word)], run_check=False, shape=shape, stride=stride)
        inputs.append(made.detach().requires_grad_() if tensor.is_floating_point() else made)
    redistributed.clear()
    try:
        with CommDebugMode() as communication:
            outputs = as_tuple(case.call(*inputs))
    except (RuntimeError, NotImplementedError, AssertionError, ValueError, IndexError):
        return None
    if redistributed or communication.get_total_counts():
        return None
    made = tuple(shown(item.placements[0]) for item in outputs)
    try:
        return made, their_gradients(inputs, outputs, words)
    except (RuntimeError, NotImplementedError):
        return made, None


def their_gradients(inputs, outputs, words) -> tuple[str, ...]:
    """How gradients come out where those of the outputs lie as the outputs do, and whole for a sum."""
    wanted = [item for item in outputs if item.requires_grad]
    given = []
    for item in wanted:
        lies = item.placements[0]
        whole = isinstance(lies, Partial)
        local = torch.ones(item.shape) if whole else torch.ones_like(item.to_local())
        placements = [Replicate() if whole else lies]
        given.append(
            DTensor.from_local(
                local, item.device_mesh, placements, run_check=False, shape=item.shape, stride=item.stride()
            )
        )
    if not wanted:
        return words
    found = torch.autograd.grad(wanted, [i for i in inputs if i.requires_grad], given, allow_unused=True)
    gradients = iter(found)
    return tuple(
        word if not item.requires_grad or (made := next(gradients)) is None else shown(made.placements[0])
        for item, word in zip(inputs, words, strict=True)
    )


def agree(ours: tuple[str, ...], theirs: tuple[str, ...] | None) -> bool:
    """A whole gradient holds the part of it that is wanted; None: DTensor has no backward of the op."""
    return theirs is None or all(a == b or (a[0] == "S" and b == "R") for a, b in zip(ours, theirs, strict=True))


def excepted(reasons: dict[str, str], operator: str) -> bool:
    return any(operator == name or (name == "conv" and operator.startswith("conv")) for name in reasons)


def numbered(cases):
    """All but attention, which has a test of its own."""
    return [pytest.param(case, id=f"{i}-{case.operator}") for i, case in enumerate(cases) if case.operator != ATTENTION]


@pytest.mark.parametrize("case", numbered(CASES))
@pytest.mark.filterwarnings("ignore")
@pytest.mark.matrix
def test_dtensor_splits_what_we_split(case, mesh, redistributed):
    ours = our_splits(case)
    differing = {}
    for words, (made, gradients) in ours.items():
        theirs = their_layouts(case, words, mesh, redistributed)
        if theirs is None or theirs[0] != made or not agree(gradients, theirs[1]):
            differing[words] = (made, gradients), theirs
    assert bool(differing) == excepted(OURS, case.operator), differing


@pytest.mark.parametrize("case", numbered(case for case in CASES if case.operator not in UNARY))
@pytest.mark.filterwarnings("ignore")
@pytest.mark.matrix
def test_we_split_what_dtensor_splits(case, mesh, redistributed):
    ours, tensors = our_splits(case), case.tensors()
    choices = [["R", *(f"S{i}" for i in range(t.dim()) if t.shape[i] % SIZE == 0)] for t in tensors]
    missing = {}
    for words in itertools.product(*choices):
        if set(words) == {"R"} or words in ours:
            continue
        theirs = their_layouts(case, words, mesh, redistributed)
        if theirs is not None:
            missing[words] = theirs
    assert bool(missing) == excepted(THEIRS, case.operator), missing


def test_attention_is_split_as_the_strategy_of_torchs_kernel_says(mesh):
    shape = (8, 4, 16, 32)
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), torch.float32)
    places = [Replicate(), *(Shard(dim) for dim in range(4))]
    given = OpStrategy([OpSpec(DTensorSpec(mesh, (place,), meta)) for place in places])
    strategies = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs[op](
        OpSchema(op, (given,) * 3, {})
    ).strategies
    theirs = {
        (*(shown(item.placements[0]) for item in found.input_specs[:3]), shown(found.output_specs[0].placements[0]))
        for found in strategies
    }
    case = next(case for case in CASES if case.operator == ATTENTION)
    ours = {(*read, made[0]) for read, (made, _) in our_splits(case).items()}
    # Over tokens, torch's strategy has keys and values split as well: it is the one of context parallelism, whose
    # kernel exchanges them. In the table they are whole, and what makes them so is a conversion.
    assert ours - theirs == {("S2", "R", "R", "S2")}
    assert theirs - ours <= {("S2", "S2", "S2", "S2"), ("R", "R", "R", "R")}


def test_every_operator_of_the_table_is_compared():
    compared = {case.operator for case in CASES}
    # In place as out of place; what a graph never holds alone; conversions, which DTensor calls redistribution.
    in_place = {name for name in operator_rows() if name.endswith("_")}
    others = {
        "_to_copy",
        "identity",
        "convolution",
        "conv_transpose1d",
        "zeros",
        "ones",
        "full",
        "arange",
        "lstm",
        "gru",
    }
    conversions = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "copy", "shard", "ring"}
    assert set(operator_rows()) - compared == in_place | others | conversions
