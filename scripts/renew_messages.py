"""Write the compiled messages of gRPC anew, from inference.proto: inference.pb, the descriptors that a server reads.

    .venv/bin/python scripts/renew_messages.py

They are data and not code of protoc, which would register its names for the whole process: those of another package's
same protocol, such as Triton's client, could then not be imported beside them.
"""

import sys
from pathlib import Path

from grpc_tools import protoc

FOLDER = Path(__file__).resolve().parent.parent / "src" / "meshwright" / "serving" / "server"


def compile_messages(out: Path) -> None:
    code = protoc.main(["protoc", f"-I{FOLDER}", f"--descriptor_set_out={out}", str(FOLDER / "inference.proto")])
    if code:
        sys.exit(code)


if __name__ == "__main__":
    compile_messages(FOLDER / "inference.pb")
