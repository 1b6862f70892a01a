"""FastAPI with a schema of the request, one uvicorn process."""

import sys

import numpy as np
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

WEIGHT = np.random.default_rng(0).random((16, 10), np.float32)
app = FastAPI()


class Tensor(BaseModel):
    name: str
    datatype: str
    shape: list[int]
    data: list[float]


class Request(BaseModel):
    id: str | None = None
    inputs: list[Tensor]


@app.post("/v2/models/tiny/infer")
async def infer(request: Request) -> dict:
    item = request.inputs[0]
    logits = np.array(item.data, np.float32).reshape(item.shape) @ WEIGHT
    odds = np.exp(logits - logits.max())
    data = (odds / odds.sum()).ravel().tolist()
    return {"model_name": "tiny", "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 10], "data": data}]}


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
