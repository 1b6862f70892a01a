"""Traces of torch's profiler: which ops become rows, with which times."""

import gzip
import json
import statistics

import pytest

from meshwright.records import import_file
from meshwright.records.importing import read_records as trace
from meshwright.records.one_device import device_row
from meshwright.spec import DTYPE_BYTES, DocumentError


def op(name, start, duration, dims=(), kinds=(), values=(), launch=0, thread=1, category="cpu_op"):
    arguments = {"External id": launch}
    if dims:
        arguments |= {"Input Dims": list(dims), "Input type": list(kinds), "Concrete Inputs": list(values)}
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 1,
        "tid": thread,
        "ts": start,
        "dur": duration,
        "args": arguments,
    }


def kernel(name, duration, launch):
    return op(name, 0, duration, launch=launch, category="kernel")


def write(tmp_path, events, **facts):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events, **facts}))
    return path


def rows_of(path, **options):
    records = import_file(path, **options).records
    return {
        (op, shapes): (seconds, count)
        for op, shapes, seconds, count in zip(
            records.op, records.shapes, records.seconds, records.num_samples, strict=True
        )
    }


FLOATS = ("float", "float")


def test_the_outermost_op_counts_with_all_that_it_calls(tmp_path):
    path = write(
        tmp_path,
        [
            op("aten::linear", 0, 100, [[4, 8], [16, 8]], FLOATS),
            op("aten::t", 5, 10, [[16, 8]], ["float"]),
            op("aten::addmm", 20, 70, [[16], [4, 8], [8, 16]], ("float", *FLOATS)),
            op("aten::relu", 200, 30, [[4, 16]], ["float"]),
            op("aten::relu", 200, 50, [[4, 16]], ["float"], thread=2),
            op("aten::relu", 300, 40, [[4, 16]], ["float"]),
        ],
    )
    assert rows_of(path) == {
        ("matmul", "m=4;n=16;k=8"): (pytest.approx(100e-6), 1),
        ("aten.relu", "4x16:float32|"): (pytest.approx(40e-6), 3),
    }


def test_ops_of_the_backward_stand_below_nodes_of_autograd(tmp_path):
    path = write(
        tmp_path,
        [
            op("autograd::engine::evaluate_function: MmBackward0", 0, 100),
            op("MmBackward0", 5, 90, [[4, 4]], ["float"]),
            op("aten::mm", 10, 80, [[8, 4], [4, 16]], FLOATS),
        ],
    )
    assert rows_of(path) == {("matmul", "m=8;n=16;k=4"): (pytest.approx(80e-6), 1)}


def test_kernels_count_where_there_are_any(tmp_path):
    events = [
        op("aten::linear", 0, 1000, [[4, 8], [16, 8]], ("c10::BFloat16",) * 2, launch=1),
        op("aten::addmm", 20, 70, launch=2),
        kernel("void sm90_gemm<cutlass::Shape<1>>(Params)", 30, 2),
        kernel("splitKreduce_kernel<1>(int)", 5, 2),
        op("aten::view", 2000, 10, [[4, 8]], ["float"], launch=3),
        op("c10d::allreduce_", 3000, 10, [[4]], ["float"], launch=4),
    ]
    path = write(tmp_path, events, deviceProperties=[{"id": 0, "name": "NVIDIA H100 80GB HBM3"}])
    imported = import_file(path)
    records = imported.records
    assert records.shapes.tolist() == ["m=4;n=16;k=8"]
    assert records.seconds[0] == pytest.approx(35e-6)
    assert (records.kernel[0], records.dtype[0], records.device[0]) == ("sm90_gemm", "bfloat16", "H100")
    assert imported.left_out["ops that start no kernel"] == 1
    assert imported.left_out["ops of no named operator (collectives, custom ones)"] == 1
    assert import_file(path, device="mine").records.device[0] == "mine"


def test_a_device_has_to_be_named_where_there_are_several(tmp_path):
    events = [op("aten::relu", 0, 1, [[4]], ["float"], launch=1), kernel("k", 1, 1)]
    names = [{"name": "NVIDIA H100"}, {"name": "NVIDIA A100"}]
    for properties in (names, [], None, 7, [{"name": None}], [{}], [names[0], {"name": 5}], [{"name": [1]}]):
        with pytest.raises(DocumentError, match="--device"):
            import_file(write(tmp_path, events, deviceProperties=properties))


def test_other_arguments_are_told_apart(tmp_path):
    path = write(
        tmp_path,
        [
            op("aten::sum", 0, 1, [[4, 8], [], []], ["float", "Scalar", ""], ["", "1", ""]),
            op("aten::sum", 5, 1, [[4, 8], [], []], ["float", "Scalar", ""], ["", "0", ""]),
            op("aten::sum", 9, 1, [[]], ["double"]),
        ],
    )
    assert set(rows_of(path)) == {
        ("aten.sum", "4x8:float32;arg1=1|"),
        ("aten.sum", "4x8:float32;arg1=0|"),
        ("aten.sum", ":float64|"),
    }


@pytest.mark.parametrize(
    "event",
    [
        op("aten::relu", 0, -1, [[4]], ["float"]),
        op("aten::relu", "soon", 1, [[4]], ["float"]),
        op("aten::relu", 0, 1, [[-4]], ["float"]),
        op("aten::relu", 0, 1, [[4.5]], ["float"]),
        op("aten::relu", 0, 1, [["4"]], ["float"]),
        op("aten::relu", 0, 1, [[4]], ["float", "float"]),
        op("aten::relu", 0, 1, [[4]], ["c10::Unheard"]),
        op("aten::relu", 0, 1),
        {"ph": "X"},
        {"ph": "X", "cat": "cpu_op", "ts": 0, "dur": 1, "args": 7},
        "text",
        None,
    ],
)
def test_odd_events_become_no_row(tmp_path, event):
    sound = op("aten::neg", 100, 2, [[4]], ["float"])
    assert set(rows_of(write(tmp_path, [event, sound]))) == {("aten.neg", "4:float32|")}
    with pytest.raises(DocumentError, match="record_shapes=True"):
        import_file(write(tmp_path, [event]))


HUGE = 10**400
NO_TIME = "ops whose start or duration is negative or no number"
ODD_KERNELS = "ops with a kernel whose duration is negative or no number"
NOT_TENSORS = "ops with impossible inputs (negative sizes, invalid strings)"
EMPTY = "ops on tensors without elements"


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([op("aten::relu", 0, -5, [[4]], ["float"])], NO_TIME),
        ([op("aten::relu", 0, HUGE, [[4]], ["float"])], NO_TIME),
        ([op("aten::relu", 1e308, 1, [[4]], ["float"])], NO_TIME),
        ([op("aten::relu", 0, True, [[4]], ["float"])], NO_TIME),
        ([op("aten::mul", 0, 1, [[4], [-4]], FLOATS)], NOT_TENSORS),
        ([op("aten::mul", 0, 1, [[4], "4"], FLOATS)], NOT_TENSORS),
        ([op("aten::mul", 0, 1, [[4], [4]], ["float", ["float"]])], NOT_TENSORS),
        ([op("aten::mul", 0, 1, [[4], []], ["float", "Scalar"], ["", {"a": 1}])], NOT_TENSORS),
        ([op("aten::relu", 0, 1, [[0, 4]], ["float"])], EMPTY),
        ([op("aten::mm", 0, 1, [[0, 4], [4, 4]], FLOATS)], EMPTY),
        ([op("aten::relu", 0, 1, [[4]], ["float"], launch=1), kernel("k", -5, 1), kernel("k", 20, 1)], ODD_KERNELS),
        ([op("aten::relu", 0, 1, [[4]], ["float"], launch=1), kernel("k", HUGE, 1)], ODD_KERNELS),
        ([op("aten::relu", 0, 1, [[4]], ["float"], launch=1), kernel("k", "5", 1)], ODD_KERNELS),
    ],
)
def test_rows_that_cannot_be_are_left_out_and_counted(tmp_path, events, reason):
    sound = [op("aten::neg", 100, 2, [[4]], ["float"], launch=7), kernel("k", 2, 7)]
    sound = sound if events[0]["args"]["External id"] else sound[:1]
    imported = import_file(write(tmp_path, [*events, *sound]), device="mine")
    assert imported.records.op.tolist() == ["aten.neg"]
    assert {reason: count for reason, count in imported.left_out.items() if count} == {reason: 1}
    with pytest.raises(DocumentError, match="1 ops"):
        import_file(write(tmp_path, events), device="mine")


@pytest.mark.parametrize("base", [HUGE, -1, "x", None, True, 1e300])
def test_an_odd_clock_gives_no_date(tmp_path, base):
    path = write(tmp_path, [op("aten::relu", 0, 1, [[4]], ["float"])], baseTimeNanoseconds=base)
    assert import_file(path).records.date.tolist() == [""]


def test_every_type_of_the_profiler_has_a_size():
    assert set(trace._DTYPES.values()) <= set(DTYPE_BYTES)


def test_a_trace_that_torch_wrote(tmp_path):
    import torch
    from torch.profiler import ProfilerActivity, profile

    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    inputs = torch.randn(32, 64)
    model(inputs).sum().backward()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(3):
            model(inputs).sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    (tmp_path / "trace.json.gz").write_bytes(gzip.compress((tmp_path / "trace.json").read_bytes()))
    imported = import_file(tmp_path / "trace.json.gz")
    records = imported.records
    found = dict(zip(zip(records.op, records.shapes, strict=True), records.num_samples, strict=True))
    # Forward; gradients of weights; the gradient of the second layer's input. The first layer's input wants none.
    for m, n, k in ((32, 128, 64), (32, 10, 128), (128, 64, 32), (10, 128, 32), (32, 128, 10)):
        assert found["matmul", f"m={m};n={n};k={k}"] == 3
    assert found["aten.relu", "32x128:float32|"] == 3
    # What torch itself says of the calls of an operator that nothing else calls.
    calls = [event.cpu_time_total / 1e6 for event in profiler.events() if event.key == "aten::relu"]
    seconds = records.seconds[records.op == "aten.relu"][0]
    assert seconds == pytest.approx(statistics.median(calls), rel=1e-3)
    assert set(records.device) == {"cpu"}
    assert records.date[0].startswith("20")


@pytest.mark.parametrize("bare", ["inf", "-inf", "Infinity", "NaN", "nan"])
def test_figures_that_are_no_json_are_read_and_are_no_times(tmp_path, bare):
    name = 'a kernel: inf, NaN ["inf"]'
    events = [
        op("aten::relu", 0, 10, [[4]], ["float"], launch=1),
        op("aten::gelu", 20, 10, [[4]], ["float"], launch=2),
        op("aten::tanh", 40, 10, [[4]], ["float"], launch=3),
        kernel(name, 5, 1),
        kernel("other", 111, 2),
        kernel("third", 7, 3),
    ]
    text = json.dumps({"traceEvents": events, "deviceProperties": [{"name": "NVIDIA H100 80GB HBM3"}]})
    # Of the kernel of gelu the duration, of that of tanh a figure that nobody reads.
    text = text.replace('"dur": 111', f'"dur": {bare}').replace('"name": "third"', f'"blocks": {bare}, "name": "third"')
    path = tmp_path / "trace.json"
    path.write_text(text)
    imported = import_file(path)
    assert sorted(zip(imported.records.op, imported.records.seconds, strict=True)) == [
        ("aten.relu", 5e-6),
        ("aten.tanh", 7e-6),
    ]
    assert "a kernel: inf, NaN" in imported.records.kernel[list(imported.records.op).index("aten.relu")]
    assert imported.left_out["ops with a kernel whose duration is negative or no number"] == 1


def test_rows_of_a_trace_and_of_a_table_of_a_device_are_the_same(tmp_path):
    events = [
        op("aten::add", 0, 10, [[8, 16], [8, 16]], ("c10::BFloat16", "c10::BFloat16"), launch=1),
        op("aten::mm", 20, 10, [[8, 16], [16, 4]], FLOATS, launch=2),
        kernel("one", 5, 1),
        kernel("two", 6, 2),
    ]
    rows = import_file(write(tmp_path, events, deviceProperties=[{"name": "NVIDIA H100 80GB HBM3"}])).records
    columns = ("op", "phase", "shapes", "dtype")
    found = set(zip(*(getattr(rows, name) for name in columns), strict=True))
    made = [
        device_row("aten.add", "bfloat16", [(8, 16), (8, 16)]),
        device_row("aten.mm", "float32", [(8, 16), (16, 4)]),
    ]
    assert found == {tuple(row[name] for name in columns) for row in made}
    assert set(rows.device) == {"H100"}
