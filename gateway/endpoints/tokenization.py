"""POST /tokenize and /detokenize, as vLLM has them: text or messages to token ids and back; no engine is asked.

Knows no queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import APIRouter, Depends, Request, Response

from noria.gateway.dependencies import ServicesDep, authenticate, json_object
from noria.gateway.errors import InvalidRequest
from noria.gateway.model_directory import ServedModel
from noria.gateway.prompts import chat_prompt, text_ids
from noria.gateway.sampling import check_ids
from noria.gateway.schemas.chat import ChatRequest
from noria.gateway.schemas.strict import parse
from noria.gateway.schemas.tokenization import CHAT_FIELDS, DetokenizeRequest, TokenizeChat, TokenizeText
from noria.gateway.services import Services
from noria.gateway.text.detokenizer import Detokenizer

router = APIRouter(dependencies=[Depends(authenticate)])


@router.post("/tokenize")
async def tokenize(request: Request, services: ServicesDep) -> Response:
    given = await json_object(request)
    model, ids, spelled_out = await (_of_chat if "messages" in given else _of_text)(services, given)
    strings = [model.tokenizer.token_text(token_id) for token_id in ids] if spelled_out else None
    answer = {"count": len(ids), "max_model_len": model.card.max_model_len, "tokens": ids, "token_strs": strings}
    return Response(orjson.dumps(answer), media_type="application/json")


@router.post("/detokenize")
async def detokenize(request: Request, services: ServicesDep) -> Response:
    body = parse(DetokenizeRequest, await json_object(request))
    model = await services.directory.resolve(body.model or _only_model(services))
    check_ids(model.card, body.tokens, "tokens")
    detokenizer = Detokenizer(model.tokenizer, frozenset(model.tokenizer.control_tokens.values()))
    answer = {"prompt": detokenizer.feed(body.tokens) + detokenizer.flush()}
    return Response(orjson.dumps(answer), media_type="application/json")


async def _of_text(services: Services, given: Mapping[str, Any]) -> tuple[ServedModel, list[int], bool]:
    body = parse(TokenizeText, given)
    model = await services.directory.resolve(body.model or _only_model(services))
    ids = await text_ids(model.tokenizer, body.prompt, body.add_special_tokens)
    return model, ids, body.return_token_strs


async def _of_chat(services: Services, given: Mapping[str, Any]) -> tuple[ServedModel, list[int], bool]:
    if given.get("prompt") is not None:
        message = "'prompt' and 'messages' exclude each other."
        raise InvalidRequest(message, param="prompt", code="invalid_parameter_combination")
    body = parse(TokenizeChat, {name: value for name, value in given.items() if name not in CHAT_FIELDS})
    chat = {name: given[name] for name in CHAT_FIELDS if name in given}
    if chat.get("model") is None:
        chat["model"] = _only_model(services)
    conversation = parse(ChatRequest, chat)
    model = await services.directory.resolve(conversation.model)
    ids = await chat_prompt(model, conversation)
    if body.add_special_tokens and model.tokenizer.add_bos and model.tokenizer.bos_id is not None:
        ids = [model.tokenizer.bos_id, *ids]
    return model, ids, body.return_token_strs


def _only_model(services: Services) -> str:
    live = services.directory.live()
    if len(live) != 1:
        message = f"Missing required parameter: 'model': {len(live)} models are served."
        raise InvalidRequest(message, param="model", code="missing_required_parameter")
    return live[0].card.id
