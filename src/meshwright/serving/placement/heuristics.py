"""Placements by equations alone: squishy bin packing, and copies of the most loaded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.serving.arrivals import mean_rate
from meshwright.serving.batching import devices_for
from meshwright.serving.placement.groups import Groups, has_room, join_alike, with_model
from meshwright.serving.policies.packing import DEVICE_OF, MODEL_OF, SHARE, Floats, pack_all
from meshwright.serving.policies.pool import NEVER
from meshwright.serving.simulation import latency_table
from meshwright.spec import Deployment, Group

_NS = 1e9


def pack_models(deployment: Deployment, scale: float = 1.0) -> Groups:
    """Groups by squishy bin packing of all rates, times a scale; models without requests are in none."""
    models = [model for model in deployment.models if mean_rate(model.arrivals) * scale > 0]
    while models:
        table = _pack(replace(deployment, models=tuple(models)), scale)
        devices = [table[table[:, DEVICE_OF] == device] for device in np.unique(table[:, DEVICE_OF])]
        if devices:
            return join_alike(
                Group(
                    devices=1,
                    models=tuple(models[int(row[MODEL_OF])].name for row in rows),
                    weights=tuple(float(row[SHARE]) * _NS for row in rows),
                )
                for rows in devices
            )
        models.remove(max(models, key=lambda model: (model.memory or 0.0) / mean_rate(model.arrivals)))
    return join_alike(())


def _pack(deployment: Deployment, scale: float) -> Floats:
    latency, limit, models = latency_table(deployment), deployment.device_memory, deployment.models
    memory = np.array([(model.memory or 0.0) / limit if limit else 0.0 for model in models])
    rates = np.array([mean_rate(model.arrivals) * scale / _NS for model in models])
    most = (latency[:, 1:] < NEVER).sum(axis=1)
    slo = np.array([round(model.slo * _NS) for model in models], np.int64)
    table = np.zeros((len(models) + deployment.devices, 6))
    count = pack_all(latency.ravel(), latency.shape[1], most, slo, rates, memory, deployment.devices, table)
    return table[:count]


def replicate_models(deployment: Deployment, scale: float = 1.0) -> Groups:
    """Groups by loads: a copy of each model, then further copies of the most loaded."""
    load = {
        model.name: devices_for(model.line, model.slo, mean_rate(model.arrivals) * scale) for model in deployment.models
    }
    devices: list[Group] = [Group(devices=1, models=())] * deployment.devices
    copies = dict.fromkeys(load, 0)

    def add(name: str) -> bool:
        """Put a model on the least loaded device with room; False if there is none."""
        with_room = [place for place in range(len(devices)) if has_room(deployment, devices[place], name)]
        if not with_room:
            return False
        loads = {place: sum(load[each] / copies[each] for each in devices[place].models) for place in with_room}
        place = min(with_room, key=loads.__getitem__)
        devices[place] = with_model(devices[place], name)
        copies[name] += 1
        return True

    for name in sorted(load, key=load.__getitem__, reverse=True):
        add(name)
    placed = [name for name in load if copies[name]]
    while any(add(name) for name in sorted(placed, key=lambda name: load[name] / copies[name], reverse=True)):
        pass
    return join_alike(devices)
