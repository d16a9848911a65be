"""Fields of chat completions beyond sampling: efforts, predictions, token ids, scores of the prompt, obfuscation."""

from __future__ import annotations

import json

import pytest

from noria.engine.wire.messages import TokenizerFiles
from noria.gateway.effort import effort_variables
from noria.gateway.errors import InvalidRequest
from noria.gateway.schemas.chat import ChatRequest
from noria.gateway.schemas.strict import parse
from noria.gateway.text.chat_template import ChatTemplate

HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def post(client, **fields):
    response = client.post("/v1/chat/completions", json={**HELLO, **fields})
    assert response.status_code == 200, response.text
    return response


def events(response):
    lines = [line[6:] for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def prompt(engine):
    return engine.tokenizer.decode(engine.seen[-1].request.prompt)


@pytest.mark.parametrize(("verbosity", "words"), [("low", "short"), ("high", "detailed"), ("medium", None)])
def test_verbosity_is_an_instruction(client, engine, verbosity, words):
    post(client, verbosity=verbosity, max_tokens=1)
    assert prompt(engine).startswith("system\n") == (words is not None)
    assert words is None or words in prompt(engine)
    assert prompt(engine).endswith("user\nhi\nassistant\n")


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max"])
def test_a_model_that_does_not_think_takes_every_effort(client, engine, effort):
    post(client, reasoning_effort=effort, max_tokens=1)
    assert prompt(engine) == "user\nhi\nassistant\n"


def test_a_prediction_reaches_the_engine_as_tokens(client, engine):
    guess = {"type": "content", "content": [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]}
    usage = post(client, prediction=guess, max_tokens=4).json()["usage"]
    request = engine.seen[-1].request
    assert engine.tokenizer.decode(request.prediction) == "Hello" and len(request.prediction) <= 4
    details = usage["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (0, 0)
    engine.predicted = (2, 3)
    for stop in (None, ["Hell"]):
        usage = post(client, prediction=guess, max_tokens=4, stop=stop).json()["usage"]
        details = usage["completion_tokens_details"]
        frames = usage["completion_tokens"]  # one for each token, those behind a stop string unread
        assert details["accepted_prediction_tokens"] == 2 * frames
        assert details["rejected_prediction_tokens"] == 3 * frames
    post(client, prediction={"type": "content", "content": "x" * 100_000}, max_tokens=4)
    assert len(engine.seen[-1].request.prediction) == 4


def test_token_ids_are_returned_whole_and_streamed(client, engine):
    body = post(client, return_token_ids=True).json()
    ids = [*engine.tokenizer.encode(engine.answer), engine.eos]
    assert body["prompt_token_ids"] == engine.seen[-1].request.prompt
    assert body["choices"][0]["token_ids"] == ids
    chunks = events(post(client, return_token_ids=True, stream=True, n=2))
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [body["prompt_token_ids"]]
    for index in (0, 1):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert [token_id for c in choices for token_id in c.get("token_ids", [])] == ids
    assert "token_ids" not in post(client).text


def test_moderation_is_answered_with_an_error_and_never_skipped(client):
    fields = {"moderation": {"model": "m", "policy": {"input": {"mode": "score"}}}, "max_tokens": 2}
    fields["prompt_cache_options"] = {"mode": "implicit", "ttl": "30m"}
    whole = post(client, **fields).json()["moderation"]
    assert {side: whole[side]["type"] for side in whole} == {"input": "error", "output": "error"}
    assert [c["moderation"] for c in events(post(client, stream=True, **fields)) if "moderation" in c] == [whole]


def test_tokens_can_be_called_by_their_ids(client, engine):
    fields = {"logprobs": True, "top_logprobs": 2, "max_tokens": 3}
    named = post(client, **fields).json()["choices"][0]["logprobs"]["content"]
    by_id = post(client, return_tokens_as_token_ids=True, **fields).json()["choices"][0]["logprobs"]["content"]
    ids = engine.tokenizer.encode(engine.answer)[:3]
    assert [entry["token"] for entry in by_id] == [f"token_id:{i}" for i in ids]
    assert [entry["bytes"] for entry in by_id] == [entry["bytes"] for entry in named]
    assert by_id[0]["top_logprobs"][0]["token"] == f"token_id:{ids[0]}"


def test_scores_of_the_prompt(client, engine):
    scores = post(client, prompt_logprobs=2, max_tokens=1).json()["prompt_logprobs"]
    ids = engine.seen[-1].request.prompt
    assert len(scores) == len(ids) and scores[0] is None
    for token_id, entry in zip(ids[1:], scores[1:], strict=True):
        assert str(token_id) in entry and len(entry) == 2
        assert entry[str(token_id)]["rank"] == 1 and entry[str(token_id)]["logprob"] == -0.25
    response = client.post("/v1/chat/completions", json={**HELLO, "prompt_logprobs": 1, "stream": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_logprobs")


def test_obfuscation_evens_out_the_sizes_of_chunks(client, engine):
    response = post(client, stream=True, stream_options={"include_obfuscation": True, "include_usage": True})
    lines = [line for line in response.text.split("\n\n") if '"content":"' in line and '"role"' not in line]
    assert lines and {(len(line.encode()) + len("\n\n")) % 64 for line in lines} == {0}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in map(_decoded, lines)) == engine.answer
    assert "obfuscation" not in post(client, stream=True).text


def _decoded(line):
    return json.loads(line.removeprefix("data: "))


def test_a_refusal_in_the_history_is_what_the_assistant_said(client, engine):
    turns = [*HELLO["messages"], {"role": "assistant", "content": None, "refusal": "No."}, *HELLO["messages"]]
    post(client, messages=turns, max_tokens=1)
    assert "assistant\nNo.\n" in prompt(engine)


def test_thinking_is_switched_by_the_means_that_a_template_has():
    def variables(source, effort):
        template = ChatTemplate(TokenizerFiles("{}", source, None, None, False))
        return effort_variables(template, parse(ChatRequest, {**HELLO, "reasoning_effort": effort}))

    assert variables("{{ reasoning_effort }}", "low") == {"reasoning_effort": "low"}
    assert variables("{% if enable_thinking %}<think>{% endif %}</think>", "none") == {"enable_thinking": False}
    assert variables("{% if enable_thinking %}<think>{% endif %}</think>", "high") == {"enable_thinking": True}
    assert variables("x", "max") == {}
    with pytest.raises(InvalidRequest):
        variables("{{ '<think>' }} … </think>", "none")
