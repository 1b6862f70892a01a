"""Grouped products: their values and gradients in every type, under autocast, and without data."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.capture.surroundings import grouped_mm

# Rows, their width, columns, and where the groups end: aligned for torch's kernel or not, with groups of no rows.
CASES = [(8, 16, 24, [3, 8]), (7, 6, 5, [0, 7, 7]), (64, 32, 48, [10, 10, 40, 64]), (0, 16, 8, [0, 0])]
TOLERANCES = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}


def by_groups(rows, matrices, ends):
    starts = [0, *ends]
    return torch.cat([rows[a:b] @ matrix for a, b, matrix in zip(starts, ends, matrices, strict=False)])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("transposed", [False, True])
def test_values_and_gradients_are_those_of_a_product_per_group(case, dtype, transposed):
    num_rows, width, columns, ends = case
    torch.manual_seed(0)
    shape = (len(ends), columns, width) if transposed else (len(ends), width, columns)
    rows, matrices = (torch.randn(size).to(dtype).requires_grad_() for size in ((num_rows, width), shape))
    exact = [item.detach().double().requires_grad_() for item in (rows, matrices)]

    def product(call, given, held, groups):
        return call(given, held.transpose(1, 2) if transposed else held, groups)

    found = product(grouped_mm, rows, matrices, torch.tensor(ends, dtype=torch.int32))
    wanted = product(by_groups, *exact, ends)
    assert found.dtype == dtype
    # The gradient of a sum is expanded, without memory of its own.
    for made in (found, wanted):
        made.sum().backward()
    for one, other in zip((found, rows.grad, matrices.grad), (wanted, *(x.grad for x in exact)), strict=True):
        error = (one.double() - other).norm() / other.norm().clamp_min(1e-30)
        assert error <= TOLERANCES[dtype] or not other.numel()


def test_autocast_computes_in_its_own_type():
    rows, matrices = torch.randn(8, 16, requires_grad=True), torch.randn(2, 16, 24, requires_grad=True)
    ends = torch.tensor([3, 8], dtype=torch.int32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = grouped_mm(rows, matrices, ends)
    assert made.dtype == torch.bfloat16
    made.float().sum().backward()
    assert rows.grad.dtype == matrices.grad.dtype == torch.float32


def test_it_follows_the_rules_of_operators():
    ends = torch.tensor([3, 8], dtype=torch.int32)
    given = torch.randn(8, 16, requires_grad=True), torch.randn(2, 16, 24, requires_grad=True), ends
    torch.library.opcheck(torch.ops.meshwright.grouped_mm.default, given)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_it_has_a_shape_without_data(dtype):
    with FakeTensorMode():
        made = grouped_mm(torch.empty(8, 6, dtype=dtype), torch.empty(3, 6, 5, dtype=dtype), torch.empty(3).int())
    assert (made.shape, made.dtype) == ((8, 5), dtype)
