"""The Jinja that chat templates run in: a sandbox without files or attributes of Python, and a bound on time and size.

Knows the dialect that Hugging Face's templates are written in; no message and no tokenizer.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from noria.gateway.text.template_input import TemplateError

MAX_SECONDS = 2.0  # of its thread's processor time
MAX_RENDERED = 32 * 2**20  # characters
MAX_BITS = 4096  # of a power
GUARD_NAME = "__noria_guard__"
_LOOK_EVERY = 128  # steps between two looks at the clock


class Template:
    """A compiled chat template. Rendering is free of state and safe from several threads."""

    def __init__(self, source: str, *, max_rendered: int = MAX_RENDERED, max_seconds: float = MAX_SECONDS) -> None:
        """Raises TemplateError if it does not compile. Sizes are characters."""
        self._max_rendered, self._max_seconds = max_rendered, max_seconds
        try:
            tree = _environment.parse(source)
            for loop in list(tree.find_all(nodes.For)):
                loop.iter = nodes.Filter(loop.iter, _COUNTED, [], [], None, None, lineno=loop.lineno)
            self._compiled = _environment.from_string(tree)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateError(f"the model's chat template does not compile: {error}") from error

    def render(self, variables: dict[str, Any]) -> str:
        """Raises TemplateError: the template's own refusal, input it cannot take, or more time or text than allowed."""
        running = _budget.set(_Budget(self._max_seconds))
        try:
            return self._bounded(self._compiled.generate(variables))
        except TemplateError:
            raise
        except _Refusal as refusal:
            raise TemplateError(str(refusal)) from refusal
        except RecursionError as error:
            raise TemplateError("messages or tools are nested too deep for the model's chat template") from error
        except Exception as error:  # a template is a program: on input that it does not expect, anything can be raised
            raise TemplateError(f"the model's chat template cannot render these messages: {error}") from error
        finally:
            _budget.reset(running)

    def _bounded(self, pieces: Iterable[str]) -> str:
        kept: list[str] = []
        size = 0
        for piece in pieces:
            kept.append(piece)
            size += len(piece)
            if size > self._max_rendered:
                raise TemplateError(f"the rendered prompt is longer than {self._max_rendered} characters")
        return "".join(kept)


class _Budget:
    """What one rendering may use. Every turn of a loop and every call is a step."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until = time.thread_time() + seconds
        self._steps = 0

    def step(self) -> None:
        self._steps += 1
        if self._steps % _LOOK_EVERY == 0 and time.thread_time() > self._until:
            raise TemplateError(f"the model's chat template takes longer than {self._seconds:g} s")


_budget: ContextVar[_Budget] = ContextVar("budget of the rendering")
_COUNTED = "__noria_counted__"


class _Counted:
    """What a loop goes over, each item a step. Its length is known where it was."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        step = _budget.get().step
        for item in self._items:
            step()
            yield item


class _CountedSized(_Counted):
    def __len__(self) -> int:
        return len(self._items)


def _counted(items: Any) -> Any:
    if isinstance(items, jinja2.Undefined):
        return items  # whose own words tell what is missing
    return _CountedSized(items) if hasattr(items, "__len__") else _Counted(items)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Calls are steps, and no operator makes a huge value of small ones."""

    intercepted_binops = frozenset(("*", "**"))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _budget.get().step()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if all(isinstance(side, int) for side in (left, right)) and left.bit_length() * right > MAX_BITS:
                raise TemplateError("the model's chat template computes a number that is too large")
        else:
            for many, times in ((left, right), (right, left)):
                if isinstance(many, str | list | tuple) and isinstance(times, int) and len(many) * times > MAX_RENDERED:
                    raise TemplateError("the model's chat template makes a text that is too long")
        return super().call_binop(context, operator, left, right)


class _Refusal(Exception):
    """Raised by a template's own `raise_exception(message)`."""


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it only scopes them."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: object) -> NoReturn:
    raise _Refusal(str(message))


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


@jinja2.pass_context
def _to_json(
    context: jinja2.runtime.Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes. The guard is written as itself even where other characters are escaped."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    guard = context.get(GUARD_NAME)
    return text.replace(json.dumps(guard)[1:-1], guard) if ensure_ascii and guard else text


def _new_environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
    environment.filters["tojson"] = _to_json
    environment.filters[_COUNTED] = _counted
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_environment = _new_environment()
GLOBAL_NAMES = frozenset(_environment.globals)
"""Names that mean something in every template, which no variable may take."""
