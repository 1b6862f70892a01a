"""Ray Serve with `serve.batch`: one proxy, one replica; samples come as bytes behind a head of JSON."""

import json
import time

import numpy as np
import ray
from network import Network, read_facts
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

FACTS = read_facts()


@serve.deployment(max_ongoing_requests=256)
class Real:
    def __init__(self, facts: dict) -> None:
        self.network = Network(facts)

    @serve.batch(max_batch_size=FACTS["batch"], batch_wait_timeout_s=FACTS["wait_s"])
    async def compute(self, samples: list[bytes]) -> list[np.ndarray]:
        return list(self.network(samples))

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        size = int(request.headers["inference-header-content-length"])
        row = await self.compute(body[size:])
        output = {
            "name": "y",
            "shape": [1, len(row)],
            "datatype": "FP32",
            "parameters": {"binary_data_size": row.nbytes},
        }
        head = json.dumps({"id": json.loads(body[:size])["id"], "outputs": [output]}).encode()
        return Response(head + row.tobytes(), headers={"Inference-Header-Content-Length": str(len(head))})


if __name__ == "__main__":
    ray.init(include_dashboard=False, num_cpus=2, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": FACTS["port"]})
    serve.run(Real.bind(FACTS), route_prefix="/v2/models/m/infer")
    while True:
        time.sleep(60)
