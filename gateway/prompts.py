"""From texts, messages or token ids to a prompt that exists in the vocabulary and fits the model.

Everything that could hurt an engine is refused here, before any queue. Knows no broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from noria.engine.wire.messages import ModelCard
from noria.engine.wire.tokenizer import Tokenizer
from noria.gateway.effort import effort_variables, with_verbosity
from noria.gateway.errors import ContextLengthExceeded, InvalidRequest
from noria.gateway.model_directory import ServedModel
from noria.gateway.sampling import check_ids
from noria.gateway.schemas.chat import INLINE_BYTES, ChatRequest
from noria.gateway.schemas.prompted import Prompt, PromptedRequest
from noria.gateway.text.chat_template import TemplateError, encode_chat
from noria.gateway.text.parsers import thinking


async def chat_prompt(model: ServedModel, request: ChatRequest) -> list[int]:
    """Token ids of the rendered conversation."""
    if model.template is None:
        raise InvalidRequest(f"The model '{model.card.id}' has no chat template: use completions.", param="model")
    template, num_bytes = model.template, request.text_bytes
    kept = kept_tokens(model.card, request, 1 if request.wanted_tokens is None else request.wanted_tokens)
    if kept is None:
        _refuse_hopeless(model, max(len(request.messages), -(-num_bytes // model.longest_token)), "messages")
    messages = with_verbosity(template, request)
    variables = {**effort_variables(template, request), **request.chat_template_kwargs}
    tools = None if request.toolset is None else request.toolset.shown
    add_generation_prompt = request.add_generation_prompt
    if add_generation_prompt is None:
        add_generation_prompt = not request.continue_final_message

    def encode() -> list[int]:
        return encode_chat(
            model.tokenizer,
            template,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=request.continue_final_message,
            **variables,
        )

    try:
        prompt = await _encode(encode, in_thread=request.is_large)
    except TemplateError as error:
        raise InvalidRequest(f"The model's chat template refuses these messages: {error}", param="messages") from error
    if not prompt:
        raise InvalidRequest("The messages render to an empty prompt.", param="messages")
    return prompt if kept is None else prompt[-kept:]


def inside_thoughts(model: ServedModel, prompt: Sequence[int]) -> bool:
    """Whether the prompt ends where the model is to think: its template may begin the thoughts for it."""
    tail = "".join(map(model.tokenizer.token_text, prompt[-8:]))
    return tail.rstrip().endswith(thinking.OPEN)


async def prediction(model: ServedModel, text: str, max_tokens: int) -> list[int]:
    """Token ids of a predicted answer, as far as it can be of use."""
    text = text[: max_tokens * model.longest_token]
    ids = await _encode(lambda: model.tokenizer.encode(text), in_thread=len(text) > INLINE_BYTES)
    return ids[:max_tokens]


async def plain_prompt(
    model: ServedModel,
    prompt: Prompt,
    *,
    param: str,
    add_special_tokens: bool = True,
    kept: int | None = None,
    may_be_empty: bool = False,
) -> list[int]:
    """Token ids of a text, or the given ones where each is inside the vocabulary; of these the last `kept`. The empty
    text is the start of a document, where the model has a token for that, unless nothing `may_be_empty`."""
    if isinstance(prompt, str):
        if kept is None:
            _refuse_hopeless(model, -(-len(prompt.encode()) // model.longest_token), param)
        ids = await text_ids(model.tokenizer, prompt, add_special_tokens)
        if not ids and not may_be_empty:
            ids = [_document_start(model.tokenizer, param)]
    else:
        check_ids(model.card, prompt, param)
        ids = prompt
    return ids if kept is None else ids[-kept:]


async def text_ids(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Token ids of a text of any length, behind the BOS token where the model begins with one."""
    ids = await _encode(lambda: tokenizer.encode(text), in_thread=len(text.encode()) > INLINE_BYTES)
    if add_special_tokens and tokenizer.add_bos and tokenizer.bos_id is not None:
        return [tokenizer.bos_id, *ids]
    return ids


def _document_start(tokenizer: Tokenizer, param: str) -> int:
    start = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
    if start is None:
        raise InvalidRequest("The prompt is empty, and this model has no token for an empty document.", param=param)
    return start


async def vector_prompts(
    model: ServedModel,
    request: PromptedRequest,
    inputs: Sequence[Prompt],
    param: str,
    *,
    add_special_tokens: bool = True,
    most: int | None = None,
) -> list[list[int]]:
    """Token ids of inputs that only become vectors, each within the context. Of texts that may be longer the first
    `most` tokens are taken."""
    kept, limit = kept_tokens(model.card, request, 0), prompt_limit(model.card)
    prompts = []
    for place, text in enumerate(inputs):
        name = f"{param}[{place}]" if len(inputs) > 1 else param
        if most is not None and isinstance(text, str):
            ids = (await text_ids(model.tokenizer, text, add_special_tokens))[:most]
        else:
            ids = await plain_prompt(model, text, param=name, add_special_tokens=add_special_tokens, kept=kept)
        if len(ids) > limit:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {limit} tokens. However, '{name}' has {len(ids)} tokens. "
                "Please shorten it.",
                param=name,
            )
        prompts.append(ids)
    return prompts


def kept_tokens(card: ModelCard, request: PromptedRequest, num_output: int) -> int | None:
    """How many of a prompt's last tokens are kept; None: all. A `truncate_prompt_tokens` of -1 leaves room for the
    output tokens."""
    kept = request.truncate_prompt_tokens
    limit = prompt_limit(card)
    if kept is not None and kept > limit:
        raise InvalidRequest(
            f"Invalid 'truncate_prompt_tokens': {kept} is more than the {limit} tokens that this model can take.",
            param="truncate_prompt_tokens",
            code="integer_above_max_value",
        )
    return max(1, limit - num_output) if kept == -1 else kept


def prompt_limit(card: ModelCard) -> int:
    """Tokens of prompt and output that one request can have at most."""
    return min(card.max_model_len, card.kv_tokens)


def room_left(card: ModelCard, num_prompt: int, wanted: int | None, *, default: int | None, param: str) -> int:
    """Output tokens that a request may have: `wanted` if it fits, else `default` cut to what fits (None: all of it).

    Raises `ContextLengthExceeded` with the numbers where the prompt leaves no room, or less than what is wanted.
    """
    limit = prompt_limit(card)
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
    limit = prompt_limit(model.card)
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
