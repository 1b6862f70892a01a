"""The command ``meshwright``: one verb (subcommand) per task. An error is printed as one paragraph.

Exit codes: 0 done, 1 error or interrupted, 2 usage, 3 no feasible plan.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

# Verbs in the order of the help: the module of each, and its line in the help. A verb is imported when it runs,
# because importing all of them takes twice as long as printing the help.
VERBS = {
    "capture": (
        "meshwright.cli.capture:capture",
        "Turn a model into a graph: ops, tensors, layers, FLOPs, what autograd saves. No weight is allocated.",
    ),
    "measure": (
        "meshwright.cli.measure:measure",
        "Time the model's ops, the optimizers and the links of this machine, on a GPU or on its processors.",
    ),
    "plan": (
        "meshwright.cli.plan.plan_command:plan",
        "Search for the fastest layout that fits and explain it. Needs no GPU and allocates no weight.",
    ),
    "simulate": (
        "meshwright.cli.simulate.simulate_command:simulate",
        "Predict when every instruction of a plan runs, its step time and each rank's peak memory.",
    ),
    "run": (
        "meshwright.cli.run:run",
        "Train the plan's model: one process per rank, the same program that was simulated.",
    ),
    "compare": (
        "meshwright.cli.compare:compare",
        "Compare a predicted and a measured timeline: step time, each kind of instruction, and the order of issue.",
    ),
    "validate": (
        "meshwright.cli.validate:validate",
        "Score predictions against public measurements that were held out, beside those of baselines: errors in per "
        "cent.",
    ),
    "show": (
        "meshwright.cli.show:show",
        "Show the contents of a document: in tables, as JSON, or on a page to play with.",
    ),
    "doctor": (
        "meshwright.cli.doctor:doctor",
        "Examine this machine: versions, devices, memory, links, reachability, limits, with a remedy for each problem.",
    ),
    "optimize": (
        "meshwright.cli.optimize:optimize",
        "Rewrite a model into an equivalent, faster one: `meshwright optimize MODEL`; options: `optimize model -h`.",
    ),
    "serve": (
        "meshwright.cli.serve:serve",
        "Serve models under deadlines: `meshwright serve DEPLOYMENT`; options: `serve run -h`.",
    ),
}


def load_verb(name: str) -> Any:
    """Import the module of a verb (a key of `VERBS`), and return its command or group of commands."""
    module, attribute = VERBS[name][0].split(":")
    found = getattr(import_module(module), attribute)
    parent = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    if isinstance(found, typer.Typer):
        parent.add_typer(found)
    else:
        parent.command(name)(found)
    return get_group(parent).commands[name]


class _Verbs(TyperGroup):
    """Lists its verbs without importing them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands.update({name: TyperCommand(name, help=line) for name, (_, line) in VERBS.items()})

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, load_verb(name) if name in VERBS else command, rest


app = typer.Typer(
    name="meshwright",
    cls=_Verbs,
    help="Plan, predict and run distributed training and serving of PyTorch models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
    """Run the command line of this process, and exit with its exit code: the entry point of ``meshwright``."""
    from meshwright.cli.output import accept_any_character

    accept_any_character()
    sys.exit(invoke(sys.argv[1:]))


def invoke(arguments: list[str]) -> int:
    """Run one command line, given without the program's name, and return its exit code."""
    try:
        _check_characters(arguments)
        app(args=arguments, prog_name="meshwright")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except BrokenPipeError:
        # The reader of the output has exited (`meshwright ... | head`), which is not an error.
        sys.stdout = None
    except Exception as error:
        return _report(error, arguments)
    return 0


def _check_characters(arguments: list[str]) -> None:
    """Raise DocumentError for arguments that are not UTF-8: they can be neither printed nor stored as names."""
    for word in arguments:
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            from meshwright.spec import DocumentError

            raise DocumentError(f"{word[:200]!r} is not valid UTF-8; expected a name in UTF-8. Rename the file.")


def _report(error: Exception, arguments: list[str]) -> int:
    """Print on standard error why a command ended, and return its exit code; reraises bugs of Meshwright itself."""
    from meshwright.cli.output import report_error
    from meshwright.extras import explain_missing, missing_of
    from meshwright.spec import MeshwrightError

    if isinstance(error, MeshwrightError):
        report_error(str(error))
        return error.exit_code
    if isinstance(error, ImportError) and (module := missing_of(error)):
        # Scoring needs every package of its extra; this one is the first that is missing.
        report_error(explain_missing("This verb", module, "validate" if arguments[:1] == ["validate"] else ""))
        return 1
    if isinstance(error, OSError) and error.filename is not None:
        # An impossible file name or an unreadable folder: raised wherever a path is first used.
        report_error(f"{error.filename}: {error.strerror}. Check the path.")
        return 1
    raise error
