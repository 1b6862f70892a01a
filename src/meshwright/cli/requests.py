"""A command's options as the fields of one request: type, help, default, and where an option has an effect.

    @dataclass(frozen=True, kw_only=True)
    class PlanRequest(Request):
        batch: Annotated[int | None, typer.Option(help="Samples per step."), Of("search", "place")] = None

The signature of the command (`as_command`), the refusal of options without effect (`CommandRequest.check`) and the
table of options on the command's page (`option_rows`) all come from these fields: a new option is one field.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

from meshwright.cli.planning import given_options


@dataclass(frozen=True, slots=True)
class Of:
    """Where an option has an effect: in these ``forms`` of the command, or in all forms if none is named.

    ``needs`` is another option without which this option has no effect. ``unless`` returns, for a request, the reason
    why the option has no effect there, or "".
    """

    forms: tuple[str, ...]
    needs: str
    unless: Callable[[Any], str] | None

    def __init__(self, *forms: str, needs: str = "", unless: Callable[[Any], str] | None = None) -> None:
        object.__setattr__(self, "forms", forms)
        object.__setattr__(self, "needs", needs)
        object.__setattr__(self, "unless", unless)


_ANYWHERE = Of()


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionField:
    """One option of a request.

    ``names`` are those that can be typed; ``takes`` is the metavariable of the value, "" for a flag; ``of`` declares
    where the option has an effect.
    """

    field: str
    names: tuple[str, ...]
    help: str
    takes: str
    of: Of

    @property
    def name(self) -> str:
        """The long name, such as ``--zero``; for a flag with an opposite, the positive name."""
        return next(name for name in self.names if name.startswith("--"))


@dataclass(frozen=True, kw_only=True)
class CommandRequest:
    """The options of one call of a command; ``given`` are the typed ones, by their long names.

    ``FORMS`` maps each form of the command to its description.
    """

    FORMS: ClassVar[Mapping[str, str]] = {}

    given: tuple[str, ...] = ()

    def form(self) -> str:
        """Return the form of the command that is called, a key of ``FORMS``."""
        return next(iter(self.FORMS))

    def check(self) -> None:
        """Raise typer.BadParameter for the first option that has no effect together with the others."""
        for option in options_of(type(self)).values():
            if option.name in self.given and (why := self.objection(option)):
                raise typer.BadParameter(f"{option.name} has no effect {why}.")

    def objection(self, option: OptionField) -> str:
        """Return the reason why an option has no effect in this request; "" if it has one."""
        of = option.of
        if of.forms and self.form() not in of.forms:
            of_others = " or ".join(self.FORMS[form] for form in of.forms)
            return f"on {self.FORMS[self.form()]}; it belongs to {of_others}. Leave it out"
        if of.needs and of.needs not in self.given:
            return f"without {of.needs}. Give both, or leave it out"
        why = of.unless(self) if of.unless is not None else ""
        return f"{why}. Leave it out" if why else ""


R = TypeVar("R", bound=CommandRequest)


def options_of(request: type[CommandRequest]) -> dict[str, OptionField]:
    """Return the options of a request by their long names, in the order of the fields."""
    found = {}
    for name, hint in _hints(request).items():
        info = _info(hint)
        if not isinstance(info, OptionInfo):
            continue
        # In an annotation, typer reads the first name as the default.
        declared = (info.default, *(info.param_decls or ())) if isinstance(info.default, str) else info.param_decls
        names = tuple(declared or (f"--{name.replace('_', '-')}",))
        # A flag with an opposite is declared as both of its names.
        names = tuple(each for pair in names for each in pair.split("/"))
        of = next((item for item in get_args(hint) if isinstance(item, Of)), _ANYWHERE)
        option = OptionField(field=name, names=names, help=info.help or "", takes=_takes(hint, info), of=of)
        found[option.name] = option
    return found


def as_command(request: type[R], run: Callable[[R], None]) -> Callable[..., None]:
    """Return a function for typer with the request's fields as parameters, which checks the request and runs it."""
    defaults = {item.name: item.default for item in fields(request)}

    def command(call: typer.Context, **values: Any) -> None:
        asked = request(given=given_options(call), **values)
        asked.check()
        run(asked)

    hints = _hints(request)
    parameters = [inspect.Parameter("call", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    for name, hint in hints.items():
        default = inspect.Parameter.empty if defaults[name] is MISSING else defaults[name]
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=_for_typer(hint))
        )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {item.name: item.annotation for item in parameters}
    command.__doc__ = run.__doc__
    command.__name__ = run.__name__
    return command


def option_rows(request: type[CommandRequest], forms: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return a row for each option of a command's page: its names, its help, and where it has an effect.

    ``forms`` maps each form of the command to its words on the page.
    """
    rows = []
    for option in options_of(request).values():
        typed = ", ".join(f"`{name}`" for name in sorted(option.names, key=len, reverse=True))
        if option.takes:
            typed = typed.replace(f"`{option.name}`", f"`{option.name} {option.takes}`", 1)
        where = [forms[form] for form in option.of.forms]
        where += [f"`{option.of.needs}`"] * bool(option.of.needs)
        rows.append((typed, option.help, ", ".join(where)))
    return rows


def _hints(request: type[CommandRequest]) -> dict[str, Any]:
    hints = get_type_hints(request, include_extras=True)
    return {item.name: hints[item.name] for item in fields(request) if item.name != "given"}


def _info(hint: Any) -> ArgumentInfo | OptionInfo | None:
    return next((item for item in get_args(hint) if isinstance(item, ArgumentInfo | OptionInfo)), None)


def _for_typer(hint: Any) -> Any:
    """The annotation without the parts that only requests read."""
    kept = [item for item in get_args(hint)[1:] if not isinstance(item, Of)]
    return Annotated[(get_args(hint)[0], *kept)]


def _takes(hint: Any, info: OptionInfo) -> str:
    """The value that an option takes: its metavariable, the choices, or a word for the type; "" for a flag."""
    if info.metavar:
        return info.metavar
    value = _value_type(get_args(hint)[0])
    if value is bool:
        return ""
    choices = get_args(value)
    if choices:
        return "|".join(map(str, choices))
    return {int: "N", float: "X", str: "TEXT"}.get(value, "FILE")


def _value_type(hint: Any) -> Any:
    """The type of one value: of ``list[int] | None``, int."""
    args = [item for item in get_args(hint) if item is not type(None)]
    if get_origin(hint) is list:
        return args[0]
    if args and type(None) in get_args(hint):
        return _value_type(args[0])
    return hint
