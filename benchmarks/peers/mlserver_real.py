"""MLServer with adaptive batching and one worker process; samples come as base64 in JSON (its codec for bytes)."""

import asyncio

from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.codecs import Base64Codec
from mlserver.types import InferenceRequest, InferenceResponse
from network import Network, read_facts


class Real(MLModel):
    async def load(self) -> bool:
        self.network = Network(read_facts())
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        rows = self.network(Base64Codec.decode_input(payload.inputs[0]))
        output = Base64Codec.encode_output("y", [row.tobytes() for row in rows], use_bytes=False)
        return InferenceResponse(id=payload.id, model_name=self.name, outputs=[output])


async def main() -> None:
    facts = read_facts()
    port = facts["port"]
    settings = Settings(
        host="127.0.0.1", http_port=port, grpc_port=port + 1, metrics_port=port + 2, parallel_workers=1, debug=False
    )
    batching = {"max_batch_size": facts["batch"], "max_batch_time": facts["wait_s"]}
    await MLServer(settings).start([ModelSettings(name="m", implementation=Real, **batching)])


if __name__ == "__main__":
    asyncio.run(main())
