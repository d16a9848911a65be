"""The `noria` command: finds what was asked for among `commands`, and turns every failure into a line and an exit code.

Exit codes: 0 done or stopped as asked; 1 something around it failed (a port in use, a store out of reach), the same
command may work later; 2 it cannot work as asked (an option, the model, the memory); 130 stopped by force.
"""

from __future__ import annotations

import inspect
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import typer

from noria.commands import COMMANDS, GROUPS, fail
from noria.supervisor import EXIT_CONFIGURATION
from noria.version import __version__

WIDE = 140
"""Columns from which settings stand in a table, which would cut the names of their variables where there are fewer."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of `noria`. A failure is one line on standard error."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if any(not word.startswith("-") for word in arguments):
        _log_to_stderr()
    usage_error: type[Exception] = typer.BadParameter.__mro__[1]  # the parent of every complaint about arguments
    try:
        result = _app(arguments)(arguments or ["--help"], prog_name="noria", standalone_mode=False)
    except usage_error as error:
        message = error.format_message()  # type: ignore[attr-defined]  # typer exports no name for its class
        if not message:  # a group without a command: its help was shown
            sys.exit(EXIT_CONFIGURATION)
        context = getattr(error, "ctx", None)
        fail(f"{message.rstrip('.')} (see {context.command_path if context else 'noria'} --help)", EXIT_CONFIGURATION)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "noria":
            raise
        fail(
            f"{error.name} is not installed: run `make install` in Noria's checkout",
            EXIT_CONFIGURATION,
        )
    except Exception as error:
        from noria.options import BadSetting
        from noria.store_address import CannotShow

        if isinstance(error, CannotShow):
            fail(str(error), error.code)
        if not isinstance(error, BadSetting):
            raise
        fail(str(error), EXIT_CONFIGURATION)
    sys.exit(result or 0)


def _app(arguments: Sequence[str]) -> typer.Typer:
    named = next((word for word in arguments if not word.startswith("-")), "")
    columns = shutil.get_terminal_size().columns
    has_settings = any(find is not None and command.__name__ == named for command, find in COMMANDS.items())
    app = typer.Typer(
        help="OpenAI-compatible serving with iteration-level scheduling.",
        add_completion=False,
        pretty_exceptions_enable=False,  # its tracebacks print local variables, and those hold keys
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": columns},
        rich_markup_mode=None if has_settings and columns < WIDE else "rich",
    )

    @app.callback(invoke_without_command=True)
    def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
        if version:
            print(f"noria {__version__}")
            raise typer.Exit

    # Options are made for the named command alone: reading the settings classes takes longer than all the rest.
    for command, find_parameters in COMMANDS.items():
        if find_parameters is not None and command.__name__ == named:
            app.command()(_with_parameters(command, find_parameters()))
        elif find_parameters is not None:
            app.command()(_with_parameters(command, []))
        else:
            app.command()(command)
    for group, text in GROUPS.items():
        app.add_typer(_group(group) if group == named else typer.Typer(help=text), name=group)
    return app


def _group(name: str) -> typer.Typer:
    from noria.tenants import GROUPS as groups
    from noria.usage import usage

    return {**groups, "usage": usage}[name]


def _with_parameters(command: Callable[..., int | None], more: list[inspect.Parameter]) -> Callable[..., int | None]:
    """The command with `**given` replaced by real options in the signature that typer reads."""

    def run(**values: Any) -> int | None:
        return command(**values)

    signature = inspect.signature(command, eval_str=True)
    fixed = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in signature.parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(fixed + more)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in fixed + more}
    return run


def _log_to_stderr() -> None:
    """Standard output is for what a command was asked for. Those that serve say more about their logs."""
    import structlog

    if not structlog.is_configured():
        structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))
