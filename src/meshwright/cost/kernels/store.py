"""Read and write kernel predictors as gzip-compressed JSON files, which contain numbers and names only.

The shipped ``cost/models/kernels.json.gz`` was fitted to the public measurements of `meshwright.validation`;
``scripts/renew_kernel_model.py`` rebuilds it.
"""

from __future__ import annotations

import base64
import gzip
import json
import zlib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.cost.costs import Interval
from meshwright.cost.kernels.boosting import Correction, Scale, Trees, num_features
from meshwright.cost.kernels.demand import SIZES
from meshwright.cost.kernels.kernel_fit import STEPS
from meshwright.cost.kernels.kernel_model import KernelGroup, KernelModel, OpModel
from meshwright.cost.kernels.law import FACTORS
from meshwright.spec import DocumentError, read_regular
from meshwright.spec.files import write_bytes

SCHEMA = "meshwright/kernels/2"
# The shipped file has 0.7 MB packed and 1.7 MB unpacked; a correction of 500 rows adds 0.1 MB.
_MAX_BYTES = 64 * 2**20


@cache
def shipped_model() -> KernelModel:
    """Return the kernel predictor that is shipped with Meshwright; the file is read once per process."""
    with resources.as_file(resources.files("meshwright.cost") / "models" / "kernels.json.gz") as path:
        return read_model(path)


def write_model(model: KernelModel, path: Path | str) -> Path:
    """Write a kernel predictor to a file and return its path; a failed write leaves no partial file.

    Raises DocumentError for an unwritable path.
    """
    text = json.dumps(_encode(model), separators=(",", ":"))
    return write_bytes(gzip.compress(text.encode(), mtime=0), Path(path))


def read_model(path: Path | str) -> KernelModel:
    """Read a kernel predictor. Raises DocumentError if the file is not a predictor, is damaged or is too large."""
    path = Path(path)
    try:
        unpacker = zlib.decompressobj(wbits=31)
        text = unpacker.decompress(read_regular(path, _MAX_BYTES), _MAX_BYTES)
        if unpacker.unconsumed_tail or not unpacker.eof:
            raise ValueError(f"the file is cut off, or has more than {_MAX_BYTES} bytes after unpacking")
        document = json.loads(text)
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise ValueError(f"'schema' is not {SCHEMA}")
        return _decode(document)
    except (ValueError, KeyError, TypeError, AttributeError, zlib.error, RecursionError) as error:
        raise DocumentError(f"{path}: not a valid kernel predictor ({error}). Write a file with write_model.") from None


def _encode(model: KernelModel) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "families": list(model.families),
        "ops": {op: _encode_op(shared) for op, shared in model.ops.items()},
        "groups": [_encode_group(group) for group in model.groups],
        "row_hashes": base64.b64encode(model.row_hashes.astype("<u8").tobytes()).decode(),
    }


def _encode_op(shared: OpModel) -> dict[str, Any]:
    return {
        "features": shared.trees.features.tolist(),
        # None stands for a threshold that no query exceeds.
        "thresholds": [[float(x) if np.isfinite(x) else None for x in row] for row in shared.trees.thresholds],
        "values": [[float(f"{x:.5g}") for x in row] for row in shared.trees.values],
        "spread": shared.scale.spread.tolist(),
        "amplitude": shared.scale.amplitude,
        "noise": shared.scale.noise,
        "transfers": {step: [shared.transfers[step].low, shared.transfers[step].high] for step in STEPS},
    }


def _encode_group(group: KernelGroup) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: getattr(group, name) for name in ("op", "dtype", "device", "family", "dispatch", "capability", "num_rows")
    }
    found["factors"] = {name: float(np.exp(x)) for (name, *_), x in zip(FACTORS, group.factors, strict=True)}
    found["interval"] = [group.interval.low, group.interval.high]
    if group.correction is not None:
        found["points"] = group.correction.points.tolist()
        found["weights"] = group.correction.weights.tolist()
    return found


def _decode(document: dict[str, Any]) -> KernelModel:
    if unknown := set(document["ops"]) - set(SIZES):
        raise ValueError(f"unknown ops {sorted(unknown)}")
    ops = {op: _decode_op(op, found) for op, found in document["ops"].items()}
    groups = tuple(_decode_group(found) for found in document["groups"])
    if not all(isinstance(family, str) for family in document["families"]):
        raise ValueError("'families' must contain names only")
    return KernelModel(
        groups=groups,
        ops=ops,
        families=tuple(document["families"]),
        row_hashes=np.frombuffer(base64.b64decode(document["row_hashes"], validate=True), "<u8"),
    )


def _decode_op(op: str, found: dict[str, Any]) -> OpModel:
    thresholds = [[np.inf if x is None else x for x in row] for row in found["thresholds"]]
    features = np.array(found["features"], np.int64)
    trees = Trees(
        features=features.astype(np.int32),
        thresholds=np.array(thresholds, np.float32),
        values=_finite(found["values"]).astype(np.float32),
    )
    num_trees, depth = features.shape
    if trees.thresholds.shape != features.shape or trees.values.shape != (num_trees, 2**depth):
        raise ValueError("'features', 'thresholds' and 'values' of the trees have different sizes")
    if not (features.min(initial=0) >= 0 and features.max(initial=0) < num_features(op)):
        raise ValueError("the trees use unknown features")
    scale = Scale(
        spread=_positive(found["spread"]),
        amplitude=float(_positive(found["amplitude"])),
        noise=float(_positive(found["noise"])),
    )
    transfers = {step: _decode_interval(found["transfers"][step]) for step in STEPS}
    return OpModel(trees=trees, scale=scale, transfers=transfers)


def _decode_group(found: dict[str, Any]) -> KernelGroup:
    correction = None
    if "points" in found:
        correction = Correction(points=_finite(found["points"]), weights=_finite(found["weights"]))
        if correction.points.shape[:1] != correction.weights.shape:
            raise ValueError("a correction has different numbers of 'points' and 'weights'")
    return KernelGroup(
        op=str(found["op"]),
        dtype=str(found["dtype"]),
        device=str(found["device"]),
        family=str(found["family"]),
        dispatch=found["dispatch"],
        capability=float(found["capability"]),
        num_rows=int(found["num_rows"]),
        factors=np.log(_positive([found["factors"][name] for name, *_ in FACTORS])),
        interval=_decode_interval(found["interval"]),
        correction=correction,
    )


def _decode_interval(found: Any) -> Interval:
    low, high = (float(x) for x in _positive(found))
    if low > high:
        raise ValueError(f"an interval goes from {low} to {high}")
    return Interval(low=low, high=high)


def _finite(found: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    numbers = np.array(found, np.float64)
    if not np.isfinite(numbers).all():
        raise ValueError("a number is not finite")
    return numbers


def _positive(found: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    numbers = _finite(found)
    if not (numbers > 0).all():
        raise ValueError("a number is not positive")
    return numbers
