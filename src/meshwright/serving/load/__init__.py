"""Load on a server: requests of the Open Inference Protocol at moments that are drawn beforehand (open loop).

streams     which models are asked, when, and by when answers are due
target      the server: its address, its models and what they take
bodies      requests as bytes, made before the first is sent
answers     responses as bytes: are they whole, and whose are they
job         what one process is to send, and what it writes down
connection  one connection, and what is under way on it
loop        sends and receives in one process
processes   the same in several
run         all of it
result      what became of the requests, as figures
"""

from meshwright.serving.load.answers import Response, decode_outputs
from meshwright.serving.load.bodies import draw_inputs
from meshwright.serving.load.result import Loaded, LoadResult
from meshwright.serving.load.run import run_load
from meshwright.serving.load.streams import RequestStream, deployment_streams
from meshwright.serving.load.target import (
    ModelSignature,
    Target,
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
