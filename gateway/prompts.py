"""From texts, messages or token ids to a prompt that exists in the vocabulary and fits the model.

Everything that could hurt an engine is refused here, before any queue. Knows no broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from noria.engine.wire.messages import ModelCard
from noria.gateway.errors import ContextLengthExceeded, InvalidRequest
from noria.gateway.model_directory import ServedModel
from noria.gateway.schemas.chat import INLINE_BYTES, ChatRequest
from noria.gateway.schemas.sampling import SamplingFields
from noria.gateway.text.chat_template import TemplateError, encode_chat


async def chat_prompt(model: ServedModel, request: ChatRequest) -> list[int]:
    """Token ids of the rendered conversation."""
    if model.template is None:
        raise InvalidRequest(f"The model '{model.card.id}' has no chat template: use completions.", param="model")
    template, num_bytes = model.template, request.text_bytes
    if request.truncate_prompt_tokens is None:
        _refuse_hopeless(model, max(len(request.messages), -(-num_bytes // model.longest_token)), "messages")
    messages = request.template_messages()
    add_generation_prompt = request.add_generation_prompt
    if add_generation_prompt is None:
        add_generation_prompt = not request.continue_final_message

    def encode() -> list[int]:
        return encode_chat(
            model.tokenizer,
            template,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=request.continue_final_message,
            **request.chat_template_kwargs,
        )

    try:
        prompt = await _encode(encode, in_thread=request.is_large)
    except TemplateError as error:
        raise InvalidRequest(f"The model's chat template refuses these messages: {error}", param="messages") from error
    if not prompt:
        raise InvalidRequest("The messages render to an empty prompt.", param="messages")
    return truncated(model.card, request, prompt)


async def text_prompt(model: ServedModel, text: str) -> list[int]:
    """Token ids of a plain text. The empty text is the start of a document, where the model has a token for that."""
    tokenizer = model.tokenizer
    num_bytes = len(text.encode())
    _refuse_hopeless(model, -(-num_bytes // model.longest_token), "prompt")
    prompt = await _encode(lambda: tokenizer.encode(text), in_thread=num_bytes > INLINE_BYTES)
    if tokenizer.add_bos and tokenizer.bos_id is not None:
        return [tokenizer.bos_id, *prompt]
    if prompt:
        return prompt
    start = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
    if start is None:
        raise InvalidRequest("The prompt is empty, and this model has no token for an empty document.", param="prompt")
    return [start]


def truncated(card: ModelCard, request: SamplingFields, prompt: list[int]) -> list[int]:
    """The last tokens of a prompt, as many as `truncate_prompt_tokens` says; -1 leaves room for `max_tokens`, or for
    one token."""
    kept = request.truncate_prompt_tokens
    if kept is None:
        return prompt
    limit = min(card.max_model_len, card.kv_tokens)
    if kept > limit:
        raise InvalidRequest(
            f"Invalid 'truncate_prompt_tokens': {kept} is more than the {limit} tokens that this model can take.",
            param="truncate_prompt_tokens",
            code="integer_above_max_value",
        )
    if kept < 0:
        kept = max(1, limit - (1 if request.wanted_tokens is None else request.wanted_tokens))
    return prompt[-kept:]


def checked_ids(model: ServedModel, prompt: list[int]) -> list[int]:
    """The given token ids, each inside the vocabulary."""
    for token_id in prompt:
        if not 0 <= token_id < model.card.vocab_size:
            top = model.card.vocab_size - 1
            message = f"Invalid 'prompt': token id {token_id} is outside the vocabulary (0 to {top})."
            raise InvalidRequest(message, param="prompt", code="invalid_value")
    return prompt


def room_left(card: ModelCard, num_prompt: int, wanted: int | None, *, default: int | None, param: str) -> int:
    """Output tokens that a request may have: `wanted` if it fits, else `default` cut to what fits (None: all of it).

    Raises `ContextLengthExceeded` with the numbers where the prompt leaves no room, or less than what is wanted.
    """
    limit = min(card.max_model_len, card.kv_tokens)
    least = 1 if wanted is None else wanted
    if num_prompt + least > limit:
        name = "maximum context length" if limit == card.max_model_len else "KV memory on this server"
        asked = "" if wanted is None else f" and {wanted} output tokens"
        raise ContextLengthExceeded(
            f"This model's {name} is {limit} tokens. However, you asked for {num_prompt + least} tokens "
            f"({num_prompt} prompt tokens{asked}). Please shorten the prompt or ask for fewer tokens.",
            param=param,
        )
    if wanted is not None:
        return wanted
    return limit - num_prompt if default is None else min(default, limit - num_prompt)


def _refuse_hopeless(model: ServedModel, least_tokens: int, param: str) -> None:
    """Refuse by size alone what cannot fit whatever it says, so that nobody waits for megabytes to be encoded."""
    limit = min(model.card.max_model_len, model.card.kv_tokens)
    if least_tokens > limit:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens. However, your {param} have at least "
            f"{least_tokens} tokens. Please shorten them.",
            param=param,
        )


async def _encode(encode: Callable[[], list[int]], *, in_thread: bool) -> list[int]:
    if in_thread:
        return await asyncio.to_thread(encode)
    await asyncio.sleep(0)  # many short prompts in a row must let others have their turn
    return encode()
