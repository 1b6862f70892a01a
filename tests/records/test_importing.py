"""What a file is, is told by its content; public tables get our units and names; nothing odd gets through."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshwright.records import import_file
from meshwright.records.parquet import write_records
from meshwright.spec import DocumentError, Measurements, OpMeasurement, write_document
from meshwright.validation import load_records
from tests.records.test_table import some_records

PROFILE = """\
node1 -- Input -- forward_compute_time=635.9, backward_compute_time=0.000, activation_size=100.0, parameter_size=0.000
node2 -- Conv2d(3, 64, kernel_size=(3, 3)) -- forward_compute_time=2.5, backward_compute_time=5.0, \
activation_size=4096.0, parameter_size=77.000
node3 -- LSTM(4, 4) -- forward_compute_time=1.0, backward_compute_time=0.0, activation_size=[10.0; 20.0; 30.0], \
parameter_size=8.000 -- stage_id=1
\tnode1 -- node2
\tnode2 -- node3"""

GEMM = {
    "op_name": "gemm",
    "gemm_dtype": "fp8",
    "m": 80,
    "n": 128,
    "k": 32,
    "latency": 0.25,
    "kernel_source": "cutlass",
    "device": "NVIDIA H100 80GB HBM3",
    "system": "h100_sxm",
    "framework": "VLLM",
    "version": "0.24.0",
}
ATTENTION = {
    "op_name": "context_attention",
    "attn_dtype": "bfloat16",
    "kv_cache_dtype": "fp8",
    "batch_size": 2,
    "beam_width": 1,
    "isl": 1024,
    "step": 0,
    "num_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "window_size": None,
    "latency": 1.5,
    **{name: GEMM[name] for name in ("kernel_source", "device", "system", "framework", "version")},
}
NCCL = {
    "op_name": "alltoall",
    "nccl_dtype": "half",
    "num_gpus": 4,
    "message_size": 512,
    "latency": 0.02,
    "kernel_source": "NCCL",
    "device": "",
    "system": "h200_sxm",
    "framework": "",
    "version": "",
}


def parquet(path, row, **changes):
    return rows_parquet(path, [{**row, **changes}] * 2)


def rows_parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def table_csv(path, row):
    path.write_text("\n".join([",".join(row), ",".join("" if value is None else str(value) for value in row.values())]))
    return path


def test_a_profile_of_pipedream(tmp_path):
    (tmp_path / "graph.txt").write_text(PROFILE)
    imported = import_file(tmp_path / "graph.txt", device="V100")
    records = imported.records
    assert records.op.tolist() == ["Conv2d(3, 64, kernel_size=(3, 3))"] * 2 + ["LSTM(4, 4)"]
    assert records.phase.tolist() == ["forward", "backward", "forward"]
    np.testing.assert_allclose(records.seconds, [2.5e-3, 5e-3, 1e-3])
    assert records.shapes[2] == "activation_bytes=60;parameter_bytes=8"
    assert imported.left_out == {"inputs (the loading of data)": 1, "passes that take no time": 1}


@pytest.mark.parametrize(
    "line",
    [
        "node2 -- ReLU() -- forward_compute_time=1.0, activation_size=1.0, parameter_size=0.0",
        "node2 -- ReLU() -- forward_compute_time=-1.0, backward_compute_time=1, activation_size=1, parameter_size=0",
        "node2 -- ReLU() -- forward_compute_time=nan, backward_compute_time=1, activation_size=1, parameter_size=0",
        "node2 -- ReLU() -- forward_compute_time=1, backward_compute_time=1, activation_size=[a; b], parameter_size=0",
        "node2 -- ReLU() -- speed=1",
        "something else",
    ],
)
def test_odd_lines_of_a_profile_are_refused(tmp_path, line):
    (tmp_path / "graph.txt").write_text(PROFILE.splitlines()[0] + "\n" + line)
    with pytest.raises(DocumentError, match=r"graph\.txt"):
        import_file(tmp_path / "graph.txt", device="V100")


def test_gemm_in_milliseconds(tmp_path):
    records = import_file(parquet(tmp_path / "g.parquet", GEMM)).records
    assert (records.op[0], records.shapes[0], records.dtype[0]) == ("matmul", "m=80;n=128;k=32", "float8_e4m3fn")
    assert (records.device[0], records.software[0], records.kernel[0]) == ("H100", "vLLM 0.24.0", "cutlass")
    assert records.seconds[0] == 0.25e-3
    assert records.source[0] == "g.parquet"


def test_other_columns_of_a_public_table_are_not_unpacked(tmp_path):
    path = parquet(tmp_path / "g.parquet", {**GEMM, "notes": [1, 2], "other": 7})
    assert len(import_file(path).records) == 2
    names = list(GEMM)
    table = pa.table([pa.array([GEMM[name]]) for name in [*names, "m"]], names=[*names, "m"])
    pq.write_table(table, path)
    with pytest.raises(DocumentError, match=r"g\.parquet.*two columns have the same name"):
        import_file(path)


def test_attention_counts_the_keys_that_are_there(tmp_path):
    records = import_file(parquet(tmp_path / "a.parquet", ATTENTION)).records
    assert records.op[0] == "attention_prefill"
    assert records.shapes[0] == "batch=2;heads=32;kv_heads=8;head_dim=128;queries=1024;keys=1024;window=0"
    assert records.dtype[0] == "bfloat16:kv=float8_e4m3fn"
    decode = {"op_name": "generation_attention", "isl": 1, "step": 15, "window_size": 128, "kv_cache_dtype": "bfloat16"}
    records = import_file(parquet(tmp_path / "d.parquet", ATTENTION, **decode)).records
    assert records.op[0] == "attention_decode"
    assert records.shapes[0].endswith("queries=1;keys=16;window=128")
    assert records.dtype[0] == "bfloat16"


def test_sizes_of_nccl_are_elements_and_of_one_rank_in_an_all_to_all(tmp_path):
    records = import_file(table_csv(tmp_path / "n.csv", NCCL)).records
    assert (records.op[0], records.dtype[0], records.device[0]) == ("all_to_all", "float16", "H200")
    assert records.shapes[0] == "bytes=4096;ranks=4;groups=1;stride=1;nodes=1;devices_per_node=4"
    assert records.seconds[0] == 0.02e-3
    records = import_file(table_csv(tmp_path / "r.csv", {**NCCL, "op_name": "reduce_scatter"})).records
    assert records.size("bytes")[0] == 1024


def test_all_reduces_of_vtrain_in_microseconds(tmp_path):
    row = {"source": "x", "device": "A100", "n_gpus": 2, "size_bytes": 1048576, "out_of_place_time_us": 44.2}
    records = import_file(table_csv(tmp_path / "n.csv", row)).records
    assert records.seconds[0] == pytest.approx(44.2e-6)
    assert records.size("bytes")[0] == 2**20


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"gemm_dtype": "int3"}, "'int3' is not known"),
        ({"device": "", "system": "abacus"}, "'abacus' is not known"),
        ({"m": 1.5}, "not whole numbers"),
        ({"latency": "fast"}, "column 'latency' holds strings"),
        ({"latency": "0.25"}, "column 'latency' holds strings"),
        ({"m": float("nan")}, "not whole numbers"),
        ({"m": float("inf")}, "not whole numbers"),
        ({"latency": True}, r"g\.parquet: .*column 'latency' holds bool"),
        ({"framework": "other"}, "'other' is not known"),
    ],
)
def test_odd_public_tables_are_refused(tmp_path, changes, told):
    with pytest.raises(DocumentError, match=told):
        import_file(parquet(tmp_path / "g.parquet", GEMM, **changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"latency": float("nan")}, "seconds that are not a number"),
        ({"latency": -1.0}, "negative seconds"),
        ({"latency": 0.0}, "zero seconds without the flag 'noop'"),
        ({"m": 0}, "a size of zero without the flag 'noop'"),
        ({"m": -4}, "shapes that are neither named sizes (m=4;n=2) nor inputs of a captured op"),
    ],
)
def test_rows_that_cannot_be_are_left_out_and_counted(tmp_path, changes, reason):
    odd = {**GEMM, **changes}
    imported = import_file(rows_parquet(tmp_path / "g.parquet", [*[GEMM] * 198, odd, odd]))
    assert len(imported.records) == 198
    assert imported.left_out == {reason: 2}
    with pytest.raises(DocumentError, match=r"3 of 200 rows are impossible \(3 with .*the file is damaged"):
        import_file(rows_parquet(tmp_path / "g.parquet", [*[GEMM] * 197, odd, odd, odd]))


@pytest.mark.parametrize("latency", ["-1.0", "nan", "1e300"])
def test_spoilt_tables_in_csv_are_refused_too(tmp_path, latency):
    path = table_csv(tmp_path / "n.csv", NCCL)
    names, row = path.read_text().splitlines()
    odd = row.replace("0.02", latency)
    path.write_text("\n".join([names, *[row] * 99, odd]))
    assert len(import_file(path).records) == 99
    path.write_text("\n".join([names, *[row] * 98, odd, odd]))
    with pytest.raises(DocumentError, match=r"n\.csv: 2 of 100 rows are impossible"):
        import_file(path)


def test_our_own_tables(tmp_path):
    path = write_records(some_records(), tmp_path / "t.parquet")
    assert import_file(path).records.row_hashes().tolist() == some_records().row_hashes().tolist()
    ops = (OpMeasurement(key="aten.relu(4:float32|1)", forward_s=1.0, backward_s=2.0, num_samples=3),)
    table = Measurements(device="cpu", software="torch", date="2026-01-01", ops=ops)
    records = import_file(write_document(table, tmp_path / "m.json")).records
    assert list(zip(records.op, records.phase, records.seconds, strict=True)) == [
        ("aten.relu", "forward", 1.0),
        ("aten.relu", "backward", 2.0),
    ]


@pytest.mark.long
def test_compressed_files_within_limits(tmp_path, monkeypatch):
    path = tmp_path / "graph.txt.gz"
    path.write_bytes(gzip.compress(PROFILE.encode()))
    assert len(import_file(path, device="V100").records) == 3
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DocumentError, match="the compressed file is truncated"):
        import_file(path, device="V100")
    path.write_bytes(b"\x1f\x8b" + b"\xff" * 50)
    with pytest.raises(DocumentError, match="cannot be decompressed"):
        import_file(path, device="V100")
    path.write_bytes(gzip.compress(bytes(400 * 2**20), 9))
    with pytest.raises(DocumentError, match="the limit of files"):
        import_file(path, device="V100")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello",
        b"\x00\x01\x02",
        b"\xff\xfe\xfa",
        b"a,b\n1,2\n",
        b'{"a": 1}',
        b"[1, 2]",
        b'{"schema": "meshwright/plan/1"}',
    ],
)
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(DocumentError, match="not a known kind of measurement file"):
        import_file(tmp_path / "file", device="V100")


@pytest.mark.parametrize("content", [b'a,b\n"1,2\n', b"a,b\n1,2,3\n", b"a,a\n1,2\n", b"{", b"PAR1 and more"])
def test_spoilt_files_are_refused(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(DocumentError, match="file"):
        import_file(tmp_path / "file", device="V100")


@pytest.mark.long
def test_what_ships_of_kernels_and_collectives():
    kernels, nccl = load_records("kernels"), load_records("nccl")
    assert len(kernels) == 48_000
    assert {name: len(kernels.where(device=name)) for name in ("A100", "H100", "H200", "L40S")} == {
        "A100": 12_000,
        "H100": 12_000,
        "H200": 12_000,
        "L40S": 12_000,
    }
    assert len(nccl) == 4_018 + 7_163
    # No product is faster than the datasheet of its device allows (dense; NVIDIA: 989.4, 312, 362.05 TFLOP/s).
    for device, peak in (("H100", 989.4e12), ("A100", 312e12), ("L40S", 362.05e12)):
        rows = kernels.where(op="matmul", dtype="bfloat16", device=device)
        rates = 2.0 * rows.size("m") * rows.size("n") * rows.size("k") / rows.seconds
        assert 0.6 * peak < rates.max() < peak
    # NVLink of the H100 moves at most 450 GB/s each way; switches that sum themselves come close.
    rows = nccl.where(op="all_reduce", device="H100", dtype="int8")
    ranks = rows.size("ranks")
    bus = 2 * (ranks - 1) / ranks * rows.size("bytes") / rows.seconds
    assert 0.5 * 450e9 < bus.max() < 450e9


def test_documents_of_strangers_are_not_run(tmp_path):
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": "__import__('os')"}))
    with pytest.raises(DocumentError, match="not a known kind of measurement file"):
        import_file(tmp_path / "trace.json")
