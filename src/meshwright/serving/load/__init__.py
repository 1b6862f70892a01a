"""Load generator: requests of the Open Inference Protocol, sent at moments that are drawn beforehand (open loop).

target      the server (address, models and their inputs), and which models get requests, when, with which deadlines
bodies      requests as bytes, made before the first request is sent
responses   responses as bytes: checked for completeness and matched to requests
loop        sends and receives in one process
load_run    a whole run, in several processes
result      outcomes of the requests, as records of a process and as figures
"""

from meshwright.serving.load.bodies import draw_inputs
from meshwright.serving.load.load_run import run_load
from meshwright.serving.load.responses import Response, decode_outputs
from meshwright.serving.load.result import Loaded, LoadResult
from meshwright.serving.load.target import (
    ModelSignature,
    RequestStream,
    Target,
    deployment_streams,
    only_model,
    read_model,
    read_model_names,
    read_target,
)

__all__ = [
    "LoadResult",
    "Loaded",
    "ModelSignature",
    "RequestStream",
    "Response",
    "Target",
    "decode_outputs",
    "deployment_streams",
    "draw_inputs",
    "only_model",
    "read_model",
    "read_model_names",
    "read_target",
    "run_load",
]
