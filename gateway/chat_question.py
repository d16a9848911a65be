"""From a chat request to the question that the generation path answers: model, prompt, sampling, text conditions.

The same for every endpoint that speaks in messages; knows no HTTP and no answer's shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec

from noria.gateway.choice import TextOptions
from noria.gateway.model_directory import ServedModel
from noria.gateway.parsing import unhurried
from noria.gateway.prompts import chat_prompt, inside_thoughts, prediction, room_left
from noria.gateway.reading import Reading, reading
from noria.gateway.sampling import check_stop_count, sampling_params, text_options
from noria.gateway.schemas.chat import ChatRequest
from noria.gateway.services import Question, Services


async def chat_question(services: Services, body: ChatRequest) -> Question:
    """Raises a `GatewayError` that names the offending field as chat completions call it."""
    check_stop_count(body, services.settings.max_stop_strings)
    services.check_choices(1, body.n)
    model = await services.directory.resolve(body.model)
    prompt = await chat_prompt(model, body)
    param = "messages" if body.wanted_tokens is None else "max_tokens"
    max_tokens = room_left(model.card, len(prompt), body.wanted_tokens, default=None, param=param)
    tools = {} if body.toolset is None else {"tools": body.toolset.shown}
    read, options = await unhurried(lambda: answer_reading(model, body, prompt), tools)
    params = sampling_params(
        model.card, body, max_tokens=max_tokens, logprobs=body.wanted_logprobs, prompt_logprobs=body.prompt_logprobs
    )
    params = msgspec.structs.replace(params, grammar=read.grammar)
    expected = None if body.prediction is None else await prediction(model, body.prediction.text, max_tokens)
    return Question(model, body, [prompt], [params], options, expected)


def answer_reading(model: ServedModel, body: ChatRequest, prompt: Sequence[int]) -> tuple[Reading, TextOptions]:
    """How the answers are read: what holds them, and what makes text and calls of their tokens."""
    read = reading(model, body.toolset, body.grammar, opened=inside_thoughts(model, prompt))
    options = text_options(model, body, logprobs=body.logprobs)
    spelled = options.spelled | read.spelled(model.tokenizer.control_tokens)
    return read, dataclasses.replace(options, parser=read.parser, spelled=spelled)
