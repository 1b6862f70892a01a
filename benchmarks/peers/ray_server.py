"""Ray Serve as it is by default: one proxy, one replica."""

import sys
import time

import numpy as np
import ray
from ray import serve
from starlette.requests import Request

WEIGHT = np.random.default_rng(0).random((16, 10), np.float32)


@serve.deployment(max_ongoing_requests=256)
class Tiny:
    async def __call__(self, request: Request) -> dict:
        item = (await request.json())["inputs"][0]
        logits = np.array(item["data"], np.float32).reshape(item["shape"]) @ WEIGHT
        odds = np.exp(logits - logits.max())
        data = (odds / odds.sum()).ravel().tolist()
        return {"model_name": "tiny", "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 10], "data": data}]}


if __name__ == "__main__":
    ray.init(include_dashboard=False, num_cpus=2, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    serve.run(Tiny.bind(), route_prefix="/v2/models/tiny/infer")
    while True:
        time.sleep(60)
