"""MLServer with adaptive batching off and no worker processes, which is its quickest way for a tiny model."""

import asyncio
import sys

import numpy as np
from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse

WEIGHT = np.random.default_rng(0).random((16, 10), np.float32)


class Tiny(MLModel):
    async def load(self) -> bool:
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        logits = NumpyCodec.decode_input(payload.inputs[0]).astype(np.float32) @ WEIGHT
        odds = np.exp(logits - logits.max())
        output = NumpyCodec.encode_output("y", odds / odds.sum())
        return InferenceResponse(model_name=self.name, outputs=[output])


async def main() -> None:
    port = int(sys.argv[1])
    settings = Settings(
        host="127.0.0.1", http_port=port, grpc_port=port + 1, metrics_port=port + 2, parallel_workers=0, debug=False
    )
    await MLServer(settings).start([ModelSettings(name="tiny", implementation=Tiny)])


if __name__ == "__main__":
    asyncio.run(main())
