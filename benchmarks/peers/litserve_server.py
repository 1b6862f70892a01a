"""LitServe with batching: at most 32 requests, or those of 2 ms."""

import sys

import litserve
import numpy as np

WEIGHT = np.random.default_rng(0).random((16, 10), np.float32)


class Tiny(litserve.LitAPI):
    def setup(self, device: str) -> None:
        pass

    def decode_request(self, request: dict) -> np.ndarray:
        return np.array(request["inputs"][0]["data"], np.float32)

    def batch(self, inputs: list) -> np.ndarray:
        return np.stack(inputs)

    def predict(self, batch: np.ndarray) -> np.ndarray:
        logits = batch @ WEIGHT
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        return odds / odds.sum(axis=1, keepdims=True)

    def unbatch(self, output: np.ndarray) -> list:
        return list(output)

    def encode_response(self, output: np.ndarray) -> dict:
        data = output.tolist()
        return {"model_name": "tiny", "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 10], "data": data}]}


if __name__ == "__main__":
    api = Tiny(max_batch_size=32, batch_timeout=0.002, api_path="/v2/models/tiny/infer")
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, log_level="warning")
