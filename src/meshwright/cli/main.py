"""``meshwright``: one verb per thing to do; errors become one paragraph and an exit code.

Exit codes: 0 done, 1 error or interrupted, 2 usage, 3 no feasible plan.
"""

from __future__ import annotations

import sys

import typer

from meshwright.cli.capture import capture
from meshwright.cli.compare import compare
from meshwright.cli.console import accept_any_character
from meshwright.cli.doctor import doctor
from meshwright.cli.measure import measure
from meshwright.cli.optimize import optimize
from meshwright.cli.output import report_error
from meshwright.cli.plan import plan
from meshwright.cli.run import run as run_verb
from meshwright.cli.serve import serve
from meshwright.cli.show import show
from meshwright.cli.simulate import simulate
from meshwright.cli.validate import validate
from meshwright.spec.errors import DocumentError, MeshwrightError

# Modules that are not part of the core: how they are called, and the extra that brings them.
EXTRAS = {
    "torch": ("torch", "torch"),
    "pyarrow": ("pyarrow", "tables"),
    "sklearn": ("scikit-learn", "validate"),
    "z3": ("z3-solver", "rewrite"),
    **{name: (name, "serve") for name in ("httptools", "msgspec", "orjson", "prometheus_client", "uvicorn", "uvloop")},
}

app = typer.Typer(
    name="meshwright",
    help="Lay a PyTorch model out on a cluster: predict, search, show, run and compare.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (capture, measure, plan, simulate, run_verb, compare, validate, show, doctor):
    app.command()(verb)
app.add_typer(optimize)
app.add_typer(serve)


@app.callback(invoke_without_command=True)
def _version(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        from meshwright import __version__

        print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def run() -> None:
    """Entry point of the ``meshwright`` command."""
    accept_any_character()
    sys.exit(invoke(sys.argv[1:]))


def _check_characters(arguments: list[str]) -> None:
    """Raise DocumentError for bytes that are no UTF-8: such a name can be neither printed nor written to a document."""
    for word in arguments:
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            raise DocumentError(f"{word[:200]!r} is not valid UTF-8; expected names that are. Rename the file.")


def invoke(arguments: list[str]) -> int:
    """Run one command line; returns its exit code."""
    try:
        _check_characters(arguments)
        app(args=arguments, prog_name="meshwright")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except MeshwrightError as error:
        report_error(str(error))
        return error.exit_code
    except ModuleNotFoundError as error:
        module = (error.name or "").split(".")[0]
        if module not in EXTRAS:
            raise
        name, extra = EXTRAS[module]
        # Scoring needs all of its extra, of which this is the first that is missed.
        extra = "validate" if arguments[:1] == ["validate"] else extra
        report_error(f"This verb needs {name}, which is not installed. Run: pip install 'meshwright[{extra}]'.")
        return 1
    except BrokenPipeError:
        # The reader of our output has gone (`meshwright ... | head`); that is its right.
        sys.stdout = None
    except OSError as error:
        # A name that no file can have, a folder that may not be looked into: found wherever a path is first used.
        if error.filename is None:
            raise
        report_error(f"{error.filename}: {error.strerror}. Check the path.")
        return 1
    return 0
