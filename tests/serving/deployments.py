"""Small deployments that tests share, drawn and fixed."""

import pytest
from hypothesis import strategies as st

from meshwright.serving import POLICY_NAMES
from meshwright.spec import Deployment, Gamma, Latency, Outage, Poisson, ServedModel, Straggler
from meshwright.spec.units import Seconds
from tests.marks import left_to_ci

# A policy takes ten to twenty seconds to compile: `make test` simulates these, and clockwork where models are loaded.
_ALWAYS = ("symphony", "adaptive")
every_policy = pytest.mark.parametrize(
    "name", [*_ALWAYS, *left_to_ci(*(name for name in POLICY_NAMES if name not in _ALWAYS))]
)


def model(name="a", *, slo=0.05, alpha=0.001, beta=0.005, largest=32, rate=500.0, shape=None, copies=1):
    arrivals = Poisson(rate=rate) if shape is None else Gamma(rate=rate, shape=shape)
    latency = Latency(alpha=Seconds(alpha), beta=Seconds(beta), largest=largest)
    return ServedModel(name=name, slo=Seconds(slo), latency=latency, arrivals=arrivals, copies=copies)


def one_model(devices=2, **facts):
    return Deployment(models=(model(**facts),), devices=devices)


@st.composite
def models(draw, name):
    alpha, beta = draw(st.floats(1e-4, 3e-3)), draw(st.floats(0, 8e-3))
    # From deadlines that leave room for one batch of one to those that never hurry.
    slo = (alpha + beta) * draw(st.sampled_from([1.0, 1.3, 2.0, 4.0, 15.0]))
    return model(
        name,
        slo=slo,
        alpha=alpha,
        beta=beta,
        largest=draw(st.sampled_from([1, 4, 64])),
        rate=draw(st.floats(5, 1500)),
        shape=draw(st.sampled_from([None, 0.1, 1.0, 20.0])),
        copies=draw(st.integers(1, 2)),
    )


@st.composite
def troubles(draw, devices):
    device = draw(st.integers(0, devices - 1))
    if draw(st.booleans()):
        return Straggler(device=device, factor=draw(st.floats(0.5, 5)))
    since = draw(st.floats(0, 0.4))
    until = draw(st.none() | st.floats(0.001, 0.3).map(lambda more: since + more))
    return Outage(device=device, since=since, until=until)


@st.composite
def deployments(draw, *, troubled=True):
    devices = draw(st.integers(1, 4))
    names = "abc"[: draw(st.integers(1, 3))]
    return Deployment(
        models=tuple(draw(models(name)) for name in names),
        devices=devices,
        delay=draw(st.sampled_from([0.0, 0.0005, 0.01])),
        slack=draw(st.sampled_from([0.0, 0.001, 0.02])),
        jitter=draw(st.sampled_from([0.0, 0.2])) if troubled else 0.0,
        troubles=tuple(draw(st.lists(troubles(devices), max_size=4))) if troubled else (),
    )
