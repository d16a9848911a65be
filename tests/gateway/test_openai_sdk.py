"""The stock openai client works with nothing changed but its address and key."""

from __future__ import annotations

import openai
import pytest

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def sdk(gateway, engine):
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="sk-test-key", max_retries=0, timeout=20) as client:
        yield client


def test_chat_completions_and_models(sdk, engine):
    assert sdk.chat.completions.create(model="tiny", messages=HI).choices[0].message.content == engine.answer
    chunks = list(
        sdk.chat.completions.create(model="tiny", messages=HI, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == engine.answer
    assert chunks[-1].usage.completion_tokens > 0
    assert engine.answer.startswith(sdk.completions.create(model="tiny", prompt="a").choices[0].text)
    texts = [c.choices[0].text for c in sdk.completions.create(model="tiny", prompt="a", stream=True, max_tokens=100)]
    assert "".join(texts) == engine.answer
    assert [model.id for model in sdk.models.list()] == ["tiny", "tiny-alias"]
    assert sdk.models.retrieve("tiny").id == "tiny"
    with sdk.chat.completions.stream(model="tiny", messages=HI) as stream:
        assert stream.get_final_completion().choices[0].message.content == engine.answer


def test_errors_become_the_clients_own_classes(sdk, engine):
    with pytest.raises(openai.NotFoundError):
        sdk.chat.completions.create(model="nope", messages=HI)
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(model="tiny", messages=HI, temperature=3)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        sdk.with_options(api_key="wrong").models.list()
    engine.fail_with = "broken"
    with pytest.raises(openai.InternalServerError):
        sdk.chat.completions.create(model="tiny", messages=HI)
    with pytest.raises(openai.APIError, match="broken"):
        list(sdk.chat.completions.create(model="tiny", messages=HI, stream=True))
