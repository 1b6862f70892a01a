"""Optional libraries: the extra that installs each, and the message if one is missing."""

from __future__ import annotations

from importlib.util import find_spec

# The name of a module, and the extra that installs it.
EXTRAS = {
    "torch": ("torch", "torch"),
    "highspy": ("highspy", "search"),
    "pyarrow": ("pyarrow", "tables"),
    "sklearn": ("scikit-learn", "validate"),
    "transformers": ("transformers", "hf"),
    "huggingface_hub": ("huggingface-hub", "hf"),
    "accelerate": ("accelerate", "trainer"),
    "pytorch_lightning": ("pytorch-lightning", "lightning"),
    "z3": ("z3-solver", "rewrite"),
    **{name: (name, "serve") for name in ("httptools", "msgspec", "orjson", "prometheus_client", "uvicorn", "uvloop")},
}


def missing_of(error: ImportError) -> str:
    """Return the module of `EXTRAS` that an error reports as not installed; "" for any other error."""
    name = (error.name or "").split(".")[0]
    return name if name in EXTRAS and isinstance(error, ModuleNotFoundError) else ""


def is_installed(module: str) -> bool:
    """Return whether a module can be found, without loading it."""
    return find_spec(module) is not None


def explain_missing(what: str, module: str, extra: str = "") -> str:
    """Return the message that ``what`` needs ``module`` (a key of `EXTRAS`), with the pip command that installs it.

    The command names ``extra``; if that is "", the extra of `EXTRAS`.
    """
    name, usual = EXTRAS[module]
    return f"{what} needs {name}, which is not installed. Run: pip install 'meshwright[{extra or usual}]'."
