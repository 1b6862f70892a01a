"""LitServe with batching and its time limit of waiting requests; samples come as base64 in JSON."""

import base64
import os

import litserve
import numpy as np
from network import Network, read_facts, to_json


class Real(litserve.LitAPI):
    def setup(self, _device: str) -> None:
        self.network = Network(read_facts())

    def decode_request(self, request: dict, context: dict) -> bytes:
        context["id"] = request["id"]
        return base64.b64decode(request["inputs"][0]["data"][0])

    def batch(self, inputs: list) -> list:
        return inputs

    def predict(self, samples: "list[bytes] | bytes") -> np.ndarray:
        # Without batching, a sample comes alone.
        return self.network(samples) if isinstance(samples, list) else self.network([samples])[0]

    def unbatch(self, output: np.ndarray) -> list:
        return list(output)

    def encode_response(self, output: np.ndarray, context: dict) -> dict:
        return {"id": context["id"], "outputs": [{"name": "y", "data": [to_json(output)]}]}


if __name__ == "__main__":
    facts = read_facts()
    api = Real(max_batch_size=facts["batch"], batch_timeout=facts["wait_s"], api_path="/v2/models/m/infer")
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=facts["slo_s"])
    server.run(host="127.0.0.1", port=facts["port"], generate_client_file=False, log_level="error")
    os._exit(0)
