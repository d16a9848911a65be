"""Messages to prompt: the model's own chat template in a sandboxed Jinja, control tokens from the template alone.

This file knows no requests, sampling or network; a request can never bring a template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from noria.engine.wire.messages import TokenizerFiles
from noria.engine.wire.tokenizer import Tokenizer
from noria.gateway.text.template_input import TemplateError, Traits, free_characters, guarded, normalised
from noria.gateway.text.template_sandbox import GLOBAL_NAMES, GUARD_NAME, MAX_RENDERED, MAX_SECONDS, Template
from noria.gateway.text.template_traits import traits_of
from noria.gateway.text.tools_in_words import calls_in_words, tools_in_words, with_instruction

__all__ = ["ChatTemplate", "TemplateError", "encode_chat"]


class ChatTemplate:
    """A model's chat template, compiled once. Rendering is free of state and safe from several threads."""

    source: str
    traits: Traits

    def __init__(
        self,
        files: TokenizerFiles,
        *,
        max_rendered: int = MAX_RENDERED,
        max_seconds: float = MAX_SECONDS,
        describe_tools: bool = True,
    ) -> None:
        """Raises TemplateError if the model's template does not compile. A model without one is told at `render`.
        `describe_tools`: where the template shows no tools, they are described in words."""
        self.source = files.chat_template or ""
        self.traits = Traits()
        self._describe_tools = describe_tools
        names = {"bos_token": files.bos_token, "eos_token": files.eos_token, **files.special_tokens}
        self._specials = {name: token for name, token in names.items() if token is not None}
        self._reserved = {"messages", "tools", "add_generation_prompt", "chat_template", GUARD_NAME, *names}
        self._reserved |= GLOBAL_NAMES
        self._template: Template | None = None
        if files.chat_template is not None:
            self._template = Template(files.chat_template, max_rendered=max_rendered, max_seconds=max_seconds)
            self.traits = traits_of(self.source, lambda variables: self._run({**self._specials, **variables}))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt as text, as `transformers` renders it.

        `continue_final_message` ends the prompt inside the last message, so that the model goes on with it (then
        `add_generation_prompt` must be False). `kwargs` are variables for the template. Raises TemplateError when the
        template refuses the messages (with its own words), when they have a shape it cannot take, when text or time
        grow past their limits, and when the model has no template.
        """
        text, guard = self.render_guarded(
            messages,
            lambda text, _: text,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **kwargs,
        )
        return text.replace(guard, "")

    def render_guarded(
        self,
        messages: Sequence[Mapping[str, Any]],
        protect: Callable[[str, str], str],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> tuple[str, str]:
        """Like `render`, with `protect(text, guard)` applied to every string that came with the request.

        Returns (rendered text, guard): `guard` is a character found in none of the strings.
        """
        if not messages:
            raise TemplateError("there are no messages to render")
        if continue_final_message and add_generation_prompt:
            raise TemplateError("continue_final_message and add_generation_prompt cannot both be true")
        reserved = sorted(self._reserved & kwargs.keys())
        if reserved:
            raise TemplateError(f"the template variable {reserved[0]!r} cannot be set by a request")
        guard, marker = free_characters(2, self.source, messages, tools, kwargs, self._specials)
        messages, tools = self._in_words(messages, tools)
        shaped = normalised(messages, self.traits)
        given = guarded({"messages": shaped, "tools": tools, **kwargs}, lambda text: protect(text, guard))
        if continue_final_message:
            _append(given["messages"][-1], marker + " ")
        text = self._run({**self._specials, **given, "add_generation_prompt": add_generation_prompt, GUARD_NAME: guard})
        return (_cut_at(text, marker) if continue_final_message else text), guard

    def _in_words(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None]:
        """What the template has no place for, told as text."""
        if not self.traits.calls and any(message.get("tool_calls") for message in messages):
            messages = calls_in_words(messages)
        if self.traits.tools or not tools:
            return messages, tools
        if self._describe_tools:
            words = tools_in_words(tools)
            messages = with_instruction(messages, words, system_role=self.traits.system_role)
        return messages, None

    def _run(self, variables: dict[str, Any]) -> str:
        if self._template is None:
            raise TemplateError("this model has no chat template; use the completions endpoint")
        return self._template.render(variables)


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    /,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    **kwargs: Any,
) -> list[int]:
    """Prompt ids. Control tokens come from the template alone; their spellings in the request's strings stay text.

    No BOS is added: a template writes its own. Raises TemplateError as `ChatTemplate.render` does.
    """
    text, guard = template.render_guarded(
        messages,
        tokenizer.control.guard,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        **kwargs,
    )
    return tokenizer.encode_template(text, guard)


def _append(message: dict[str, Any], tail: str) -> None:
    if isinstance(message["content"], str):
        message["content"] += tail
    else:
        message["content"][-1]["text"] += tail


def _cut_at(text: str, marker: str) -> str:
    """`text` up to `marker`, which was put behind the last message with a space behind itself.

    If that space is gone, the template trims its messages, and the space before the marker goes too.
    """
    end = text.rfind(marker)
    if end < 0:
        raise TemplateError("the model's chat template does not show the final message, so it cannot be continued")
    return text[:end] if text.startswith(" ", end + 1) else text[:end].rstrip()
