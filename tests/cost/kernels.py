"""Made-up GPUs and rows of products on them, whose seconds follow a rule that can be written down."""

import numpy as np

from meshwright.records import make_records, named_shapes
from meshwright.spec import DeviceKind

LIBRARY = "torch.nn.functional.linear"


def make_gpu(name="g1", speed=1.0, units=100):
    return DeviceKind(
        name=name,
        memory_bytes=2**36,
        memory_bandwidth_bytes_per_s=2e12 * speed,
        peak_flops_per_s={"bfloat16": 300e12 * speed},
        source="made up",
        num_multiprocessors=units,
        cache_bytes=40 * 2**20,
        clock_hz=1.5e9,
        compute_capability=8.0,
    )


def rule_seconds(m, n, k, gpu):
    """A roofline at three quarters of the datasheet, and 3 µs."""
    bound = np.maximum(
        2 * m * n * k / gpu.peak_flops_per_s["bfloat16"],
        2 * (m * k + k * n + m * n) / gpu.memory_bandwidth_bytes_per_s,
    )
    return 3e-6 + bound / 0.75


def make_rows(gpu, count=300, seed=0, noise=0.02):
    rng = np.random.default_rng(seed)
    m, n, k = 2 ** rng.integers(4, 13, (3, count)).astype(float)
    seconds = rule_seconds(m, n, k, gpu) * np.exp(noise * rng.standard_normal(count))
    shapes = [named_shapes(m=a, n=b, k=c) for a, b, c in zip(m, n, k, strict=True)]
    return make_records(
        op="matmul", shapes=shapes, dtype="bfloat16", device=gpu.name, kernel=LIBRARY, seconds=seconds, source="rule"
    )
