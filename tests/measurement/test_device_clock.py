"""The clock of CUDA devices: by torch's own on a GPU, its decisions by a GPU that is made up."""

import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from meshwright.measurement import CudaClock


class MadeUpGpu:
    """Kernels take a microsecond each on the time line of ``now``; calls are counted by what they run in."""

    def __init__(self, monkeypatch):
        self.now, self.capturing, self.delays = 0.0, None, []
        gpu = self

        class Event:
            def __init__(self, **_):
                self.at = 0.0

            def record(self):
                self.at = gpu.now

            def synchronize(self):
                pass

            def elapsed_time(self, other):
                return 1e3 * (other.at - self.at)

        class Graph:
            kernels = 0

            def replay(self):
                gpu.now += 1e-6 * self.kernels

        class Capture:
            def __init__(self, graph, **_):
                self.graph = graph

            def __enter__(self):
                gpu.capturing = self.graph

            def __exit__(self, *error):
                captured, gpu.capturing = gpu.capturing, None
                if captured.kernels == 0 and error[0] is None:
                    warnings.warn("The CUDA Graph is empty. This usually means ...", stacklevel=1)

        made = {
            "Stream": lambda *_: SimpleNamespace(wait_stream=lambda _: None),
            "default_stream": lambda *_: None,
            "stream": lambda _: nullcontext(),
            "CUDAGraph": Graph,
            "graph": Capture,
            "Event": Event,
            "synchronize": lambda *_: None,
            "empty_cache": lambda: None,
            "_sleep": self.delays.append,
            "get_device_properties": lambda _: SimpleNamespace(L2_cache_size=7),
        }
        for name, value in made.items():
            monkeypatch.setattr(torch.cuda, name, value, raising=False)

    def kernel(self):
        if self.capturing is not None:
            self.capturing.kernels += 1
        else:
            self.now += 1e-6

    def synchronizing(self):
        if self.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.kernel()


def test_calls_are_timed_by_replays_of_a_graph(monkeypatch):
    gpu = MadeUpGpu(monkeypatch)
    clock = CudaClock(torch.device("cuda:0"), repeats=4)
    taken = clock.time([gpu.kernel])
    assert (taken.seconds, taken.spread) == pytest.approx((1e-6, 0.0))
    assert taken.num_samples == 4 * 20
    assert clock.time([gpu.kernel] * 3).num_samples == 4 * 18, "every copy as often as the others"
    assert (clock.cache_bytes, gpu.delays) == (7, [])


def test_what_cannot_be_captured_is_timed_behind_a_delay(monkeypatch):
    gpu = MadeUpGpu(monkeypatch)
    taken = CudaClock(torch.device("cuda:0"), repeats=4).time([gpu.synchronizing])
    assert taken.seconds == pytest.approx(1e-6)
    assert len(gpu.delays) == 4


def test_what_starts_no_kernel_takes_no_time(monkeypatch):
    MadeUpGpu(monkeypatch)
    assert CudaClock(torch.device("cuda:0")).time([lambda: None]).seconds == 0.0


def test_a_step_has_the_hosts_seconds_apart(monkeypatch):
    gpu = MadeUpGpu(monkeypatch)
    taken = CudaClock(torch.device("cuda:0"), repeats=3).step(gpu.kernel)
    assert taken.seconds == pytest.approx(1e-6)
    assert 0 < taken.issue_s < 1


@pytest.mark.gpu
def test_a_model_is_measured_on_a_gpu():
    from meshwright.training import measure_device_here

    run = measure_device_here("gpt-tiny", [2], repeats=5)
    assert run.left_out == {}
    linear = [row for row in run.table.ops if row.key.startswith("aten.linear")]
    assert all(1e-6 < row.forward_s < 1e-3 and row.backward_s > 1e-6 for row in linear)
    assert all(1e-6 < row.forward_issue_s < 1e-3 for row in linear)
    views = [row for row in run.table.ops if row.key.startswith("aten.transpose")]
    assert {(row.forward_s, row.backward_s) for row in views} == {(0.0, 0.0)}
    fused = [row for row in run.table.optimizers if row.kind == "adamw.fused"]
    assert all(row.seconds > 0 and row.issue_s > 0 for row in fused)
    assert run.table.host_call_s < 1e-4
