"""Public tables of kernels and collectives as rows of the measurement table.

    ai-dynamo/aiconfigurator   GEMM, attention of a prompt and of a generated token, NCCL: ``latency`` in milliseconds;
                               ``message_size`` of NCCL counts elements (half precision takes twice as long as int8)
                               of the full tensor, but of one rank's part in an all-to-all (nccl-tests, PERFORMANCE.md:
                               bandwidths agree so); keys of attention = ``isl`` + ``step``
    VIA-Research/vTrain        NCCL all-reduce among n devices of one node: out-of-place time in microseconds

Text after a colon in a dtype names a further property: ``float8_e4m3fn:block`` (scales per block),
``bfloat16:kv=float8_e4m3fn`` (dtype of the cached keys and values). Devices get the names of the shipped device kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.records.importing.imported import Imported
from meshwright.records.record_table import keep_sound, named_shapes
from meshwright.spec import DTYPE_BYTES, DocumentError

if TYPE_CHECKING:
    from numpy.typing import NDArray

Columns = dict[str, "NDArray[Any]"]

# Names of devices as their driver gives them, and the device kinds that are shipped.
DEVICES = {
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H200": "H200",
    "NVIDIA L40S": "L40S",
    "NVIDIA B200": "B200",
}
_SYSTEMS = {"a100_sxm": "A100", "h100_sxm": "H100", "h200_sxm": "H200", "l40s": "L40S", "b200_sxm": "B200"}
# vLLM's float8 weights are e4m3fn (vllm/model_executor/layers/quantization/fp8.py).
_DTYPES = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "int8": "int8",
    "fp8": "float8_e4m3fn",
    "fp8_block": "float8_e4m3fn:block",
}
_COLLECTIVES = {"alltoall": "all_to_all"}


def read_public(columns: Columns, *, source: str) -> Imported | None:
    """Return the rows of a public table, which its column names identify; None for an unknown kind of table.

    ``source`` is the file's name, for rows and messages. Raises DocumentError for impossible or unknown values.
    """
    for needed, kind, convert in _KINDS:
        if needed <= columns.keys():
            try:
                records, left_out = keep_sound(**{"source": source, **convert(columns)})
            except KeyError as error:
                raise DocumentError(
                    f"{source}: the value {error.args[0]!r} is not known for a table of {kind}. Leave its rows out."
                ) from None
            except (ValueError, TypeError, OverflowError) as error:
                raise DocumentError(
                    f"{source}: the table of {kind} has impossible figures ({error}). Check the file."
                ) from None
            return Imported(kind=kind, records=records, left_out=left_out)
    return None


def public_columns(names: Collection[str]) -> list[str]:
    """Return the column names among ``names`` that `read_public` reads; empty for an unknown kind of table."""
    for needed, _, _ in _KINDS:
        if needed <= set(names):
            return [name for name in names if name in needed | {"source"}]
    return []


def _gemm(columns: Columns) -> dict[str, Any]:
    sizes = {name: _integers(columns[name]) for name in "mnk"}
    return {"op": "matmul", "dtype": _mapped(columns["gemm_dtype"], _DTYPES), **_common(columns, sizes)}


def _attention(columns: Columns) -> dict[str, Any]:
    queries = _integers(columns["isl"])
    sizes = {
        "batch": _integers(columns["batch_size"]),
        "heads": _integers(columns["num_heads"]),
        "kv_heads": _integers(columns["num_key_value_heads"]),
        "head_dim": _integers(columns["head_dim"]),
        "queries": queries,
        "keys": queries + _integers(columns["step"]),
        "window": _integers(columns["window_size"], missing=0),
    }
    names = {"context_attention": "attention_prefill", "generation_attention": "attention_decode"}
    computed = _mapped(columns["attn_dtype"], _DTYPES)
    kept = _mapped(columns["kv_cache_dtype"], _DTYPES)
    dtype = [one if one == other else f"{one}:kv={other}" for one, other in zip(computed, kept, strict=True)]
    return {"op": _mapped(columns["op_name"], names), "dtype": dtype, **_common(columns, sizes)}


def _nccl(columns: Columns) -> dict[str, Any]:
    dtype = _mapped(columns["nccl_dtype"], _DTYPES)
    ranks = _integers(columns["num_gpus"])
    ops = [_COLLECTIVES.get(name, name) for name in columns["op_name"]]
    num_bytes = _integers(columns["message_size"]) * np.array([DTYPE_BYTES[name] for name in dtype])
    sizes = _one_node(np.where(np.array(ops) == "all_to_all", num_bytes * ranks, num_bytes), ranks)
    software = [f"NCCL {version}".strip() for version in columns["version"]]
    return {**_common(columns, sizes), "op": ops, "dtype": dtype, "software": software}


def _vtrain(columns: Columns) -> dict[str, Any]:
    ranks = _integers(columns["n_gpus"])
    # nccl-tests sums float32 unless told otherwise; the tables do not say.
    return {
        "op": "all_reduce",
        "dtype": "float32",
        "shapes": _shapes(_one_node(_integers(columns["size_bytes"]), ranks)),
        "device": columns["device"].astype(object),
        "software": "NCCL",
        "kernel": "NCCL",
        "seconds": columns["out_of_place_time_us"].astype(np.float64) / 1e6,
        "source": columns["source"],
    }


def _common(columns: Columns, sizes: Mapping[str, NDArray[np.int64]]) -> dict[str, Any]:
    """What all tables of aiconfigurator have."""
    systems = [DEVICES.get(device) or _SYSTEMS[system] for device, system in _pairs(columns, "device", "system")]
    software = [f"{_FRAMEWORKS[name]} {version}".strip() for name, version in _pairs(columns, "framework", "version")]
    return {
        "shapes": _shapes(sizes),
        "device": systems,
        "software": software,
        "kernel": columns["kernel_source"],
        "seconds": columns["latency"].astype(np.float64) / 1e3,
        **({"source": columns["source"]} if "source" in columns else {}),
    }


_FRAMEWORKS = {"VLLM": "vLLM", "TRTLLM": "TensorRT-LLM", "SGLANG": "SGLang", "": ""}


def _one_node(num_bytes: NDArray[np.int64], ranks: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
    one = np.ones_like(ranks)
    return {"bytes": num_bytes, "ranks": ranks, "groups": one, "stride": one, "nodes": one, "devices_per_node": ranks}


def _shapes(sizes: Mapping[str, NDArray[np.int64]]) -> list[str]:
    rows = zip(*(column.tolist() for column in sizes.values()), strict=True)
    return [named_shapes(**dict(zip(sizes, row, strict=True))) for row in rows]


def _pairs(columns: Columns, first: str, second: str) -> zip[tuple[str, str]]:
    return zip(columns[first], columns[second], strict=True)


def _mapped(column: NDArray[Any], names: Mapping[str, str]) -> list[str]:
    return [names[text] for text in column]


def _integers(column: NDArray[Any], *, missing: int | None = None) -> NDArray[np.int64]:
    """Whole numbers; what is missing (NaN, or an empty cell) is ``missing``."""
    figures = np.array([np.nan if text == "" else text for text in column], np.float64)
    if missing is not None:
        figures[np.isnan(figures)] = missing
    if not (np.isfinite(figures).all() and np.array_equal(figures, np.trunc(figures))):
        raise ValueError("sizes that are not whole numbers")
    return figures.astype(np.int64)


def _columns(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The columns of these tables that hold numbers; in a CSV, they are strings, too.
NUMBERS = _columns(
    "m n k batch_size isl step num_heads num_key_value_heads head_dim window_size num_gpus message_size n_gpus "
    "size_bytes latency out_of_place_time_us"
)
_KINDS: tuple[tuple[frozenset[str], str, Callable[[Columns], dict[str, Any]]], ...] = (
    (_columns("gemm_dtype m n k latency system device framework version kernel_source"), "GEMM kernels", _gemm),
    (
        _columns(
            "attn_dtype kv_cache_dtype batch_size isl step num_heads num_key_value_heads head_dim window_size latency "
            "op_name system device framework version kernel_source"
        ),
        "attention kernels",
        _attention,
    ),
    (
        _columns("op_name nccl_dtype num_gpus message_size latency system device framework version kernel_source"),
        "NCCL collectives",
        _nccl,
    ),
    (_columns("n_gpus size_bytes out_of_place_time_us device source"), "NCCL all-reduces", _vtrain),
)
