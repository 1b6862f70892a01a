"""Numpy types of the Open Inference Protocol's tensor types."""

from __future__ import annotations

import numpy as np

# numpy has no bfloat16: BF16 values are passed through as 16-bit words, never computed with.
NUMPY_TYPES = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "BF16": np.uint16,
    "FP32": np.float32,
    "FP64": np.float64,
}
