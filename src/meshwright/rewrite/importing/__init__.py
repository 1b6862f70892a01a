"""Rule files of other systems, read as rules: `read_taso` (TASO's protobuf), `read_unity` (FlexFlow's JSON)."""

from meshwright.rewrite.importing.taso import read_taso
from meshwright.rewrite.importing.unity import read_unity

__all__ = ["read_taso", "read_unity"]
