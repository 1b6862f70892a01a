"""Small deployments that tests share."""

from __future__ import annotations

from meshwright.spec import Deployment, Gamma, Latency, Poisson, ServedModel
from meshwright.spec.quantities import Seconds


def make_model(name="model", *, alpha_ms=1.0, beta_ms=5.0, slo_ms=25.0, rate=100.0, shape=1.0, largest=64, copies=1):
    return ServedModel(
        name=name,
        slo=Seconds(slo_ms / 1e3),
        latency=Latency(alpha=Seconds(alpha_ms / 1e3), beta=Seconds(beta_ms / 1e3), largest=largest),
        arrivals=Poisson(rate=rate) if shape == 1 else Gamma(rate=rate, shape=shape),
        copies=copies,
    )


def deploy(*models, devices=2, **settings):
    return Deployment(models=models or (make_model(),), devices=devices, **settings)
