"""What a server refuses of a deployment before anything starts."""

from dataclasses import replace

import pytest

from meshwright.serving.server.servable import check_served
from meshwright.spec import Deployment, Latency, ServedModel, Server, ServingError, TensorSpec


def deployment(*inputs, slo=5.0, devices=2, **limits):
    model = ServedModel(name="m", slo=slo, latency=Latency(alpha=1e-3, beta=1e-3, largest=8), inputs=inputs)
    return Deployment(devices=devices, policy="eager", models=(model,), server=Server(**limits))


def test_a_server_has_as_many_devices_as_processes_can_be():
    check_served(deployment(devices=256))
    with pytest.raises(ServingError, match="has 257 devices; a server has at most 256"):
        check_served(deployment(devices=257))


def test_no_model_has_more_time_than_a_request_may_ask_for():
    check_served(deployment(longest_deadline=5.0))
    with pytest.raises(ServingError, match=r"SLO of 5 s, and .server. longest_deadline is 4 s"):
        check_served(deployment(longest_deadline=4.0))


@pytest.mark.parametrize(("datatype", "least"), [("FP32", 2), ("BF16", 2), ("INT64", 1), ("BOOL", 1)])
def test_a_sample_of_each_model_fits_into_a_body(datatype, least):
    given = deployment(TensorSpec(name="x", datatype=datatype, shape=(30, 10)), TensorSpec(name="y", datatype=datatype))
    check_served(replace(given, server=Server(body_bytes=301 * least)))
    with pytest.raises(
        ServingError, match=f"at least {301 * least} bytes, and .server. body_bytes is {301 * least - 1}"
    ):
        check_served(replace(given, server=Server(body_bytes=301 * least - 1)))
