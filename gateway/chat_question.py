"""From a chat request to the question that the generation path answers: model, prompt, sampling, text conditions.

The same for every endpoint that speaks in messages; knows no HTTP and no answer's shape.
"""

from __future__ import annotations

from noria.gateway.prompts import chat_prompt, room_left
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
    params = sampling_params(
        model.card, body, max_tokens=max_tokens, logprobs=body.wanted_logprobs, prompt_logprobs=None
    )
    return Question(model, body, [prompt], [params], text_options(model, body, logprobs=body.logprobs))
