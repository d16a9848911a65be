"""POST /v1/completions over HTTP, the store and a scripted engine."""

from __future__ import annotations

import json

import pytest

from tests.gateway.conftest import tokenizer_files


def post(client, prompt="ab", **fields):
    return client.post("/v1/completions", json={"model": "tiny", "prompt": prompt, **fields})


def events(response):
    lines = [line[6:] for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def joined(chunks, index):
    """One choice of a stream put together again: text, finish reasons, logprob lists."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    lists: dict[str, list] = {}
    for choice in choices:
        for name, items in (choice["logprobs"] or {}).items():
            lists.setdefault(name, []).extend(items)
    return "".join(c["text"] for c in choices), [c["finish_reason"] for c in choices if c["finish_reason"]], lists


def test_default_is_sixteen_tokens(client, engine):
    body = post(client).json()
    assert body["object"] == "text_completion"
    assert engine.seen[0].request.sampling.max_tokens == 16
    assert engine.seen[0].request.prompt == engine.tokenizer.encode("ab")
    choice = body["choices"][0]
    assert choice["finish_reason"] == "length" and engine.answer.startswith(choice["text"])
    assert (choice["logprobs"], body["usage"]["total_tokens"]) == (None, 18)


def test_prompt_lists_are_prompt_major_with_n(client, engine):
    body = post(client, ["a", "bb", "ccc"], n=2, max_tokens=2, seed=3).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (6, 12)
    by_place = {int(c.request.id.rsplit("-")[-1]): c.request for c in engine.seen}
    assert [len(by_place[place].prompt) for place in range(6)] == [1, 1, 2, 2, 3, 3]
    seeds = [by_place[place].sampling.seed for place in range(6)]
    assert seeds[0] == seeds[2] == seeds[4] == 3 and seeds[1] == seeds[3] == seeds[5] != 3


def test_token_ids_are_taken_as_they_are(client, engine):
    assert post(client, [5, 6, 7], max_tokens=1).json()["usage"]["prompt_tokens"] == 3
    assert len(post(client, [[5, 6], [7]], max_tokens=1).json()["choices"]) == 2
    assert sorted(c.request.prompt for c in engine.seen) == [[5, 6], [5, 6, 7], [7]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["ab 🎉", [[104, 105]]])
def test_echo_comes_first_with_its_own_logprobs(client, engine, prompt, stream):
    response = post(client, prompt, echo=True, logprobs=2, max_tokens=3, stream=stream)
    text = prompt if isinstance(prompt, str) else engine.tokenizer.decode(prompt[0])
    if stream:
        got, finishes, logprobs = joined(events(response), 0)
    else:
        (choice,) = response.json()["choices"]
        got, finishes, logprobs = choice["text"], [choice["finish_reason"]], choice["logprobs"]
    assert (got, finishes) == (text + "Hello"[: len(got) - len(text)], ["length"])
    num_prompt = len(engine.seen[0].request.prompt)
    assert {len(items) for items in logprobs.values()} == {num_prompt + 3}
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(isinstance(score, float) for score in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"][num_prompt] == len(text)
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert all(token in top for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True))


def test_echo_alone_scores_the_prompt(client, engine):
    choice = post(client, "abc", echo=True, logprobs=0, max_tokens=0).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert len(choice["logprobs"]["tokens"]) == 3
    assert engine.seen[0].request.sampling.max_tokens == 0


def test_stream_equals_whole(client, engine):
    fields = {"max_tokens": 30, "logprobs": 2, "n": 2, "stop": ["wörl"], "echo": True}
    whole = post(client, ["x", "yy"], **fields).json()
    *chunks, last = events(post(client, ["x", "yy"], stream=True, stream_options={"include_usage": True}, **fields))
    for choice in whole["choices"]:
        want = (choice["text"], [choice["finish_reason"]], choice["logprobs"])
        assert joined(chunks, choice["index"]) == want
    assert last["usage"] == whole["usage"]


def test_the_empty_text_is_the_start_of_a_document(client, engine):
    assert post(client, "", max_tokens=1).status_code == 200
    assert engine.seen[0].request.prompt == [engine.tokenizer.bos_id]


def test_include_stop_string(client, engine):
    choice = post(client, max_tokens=30, stop=" wörld", include_stop_str_in_output=True).json()["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("Hello, wörld", " wörld")
    chunks = events(post(client, max_tokens=30, stop=" wörld", stream=True))
    assert [c["choices"][0].get("stop_reason") for c in chunks] == [None] * (len(chunks) - 1) + [" wörld"]


@pytest.mark.parametrize("stream", [False, True])
def test_special_tokens_are_shown_to_who_asks(client, engine, stream):
    engine.answer_ids = [engine.tokenizer.control_tokens["<|im_start|>"], *engine.tokenizer.encode("hi")]

    def text(**fields):
        response = post(client, stream=stream, **fields)
        return joined(events(response), 0)[0] if stream else response.json()["choices"][0]["text"]

    assert text() == text(include_stop_str_in_output=True) == "hi"
    assert text(skip_special_tokens=False) == "<|im_start|>hi"
    assert text(skip_special_tokens=False, include_stop_str_in_output=True) == "<|im_start|>hi<|im_end|>"


def test_prompts_are_cut_and_blocks_kept_apart(client, engine):
    post(client, "abcdef", truncate_prompt_tokens=2, max_tokens=1, cache_salt="mine")
    request = engine.seen[0].request
    assert (request.prompt, request.cache_salt) == (engine.tokenizer.encode("ef"), "mine")


def test_the_likeliest_of_many_samples_are_given(client, engine):
    def place(request):
        return int(request.id.rsplit("-")[-1])

    engine.logprob = lambda request: -1.0 + [0.1, 0.5, 0.2, 0.4, 0.3][place(request) % 5]
    body = post(client, ["a", "b"], n=2, best_of=5, max_tokens=3, logprobs=0).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    means = [choice["logprobs"]["token_logprobs"] for choice in body["choices"]]
    assert means == [[-0.5] * 3, [-0.6] * 3] * 2
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (2, 30)  # all samples count
    (choice,) = post(client, "a", best_of=3, max_tokens=3).json()["choices"]
    assert choice["logprobs"] is None and choice["text"] == "Hello"


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_and_scores_of_the_prompt(client, engine, stream):
    fields = {"return_token_ids": True, "prompt_logprobs": 2, "max_tokens": 8, "stop": ", w"}
    response = post(client, [[5, 6, 7], [7, 8]], stream=stream, **fields)
    listed = [c for e in events(response) for c in e["choices"]] if stream else response.json()["choices"]
    for index, prompt in enumerate(([5, 6, 7], [7, 8])):
        first, *others = [choice for choice in listed if choice["index"] == index]
        assert first["prompt_token_ids"] == prompt
        assert not any("prompt_token_ids" in choice or "prompt_logprobs" in choice for choice in others)
        output = [i for choice in (first, *others) for i in choice["token_ids"]]
        assert output == engine.tokenizer.encode("Hello, w")  # the tokens of a stop string were made as well
        none, *scores = first["prompt_logprobs"]
        assert none is None and [next(iter(entry)) for entry in scores] == [str(i) for i in prompt[1:]]
        own, other = scores[-1].values()
        assert own == {"logprob": -0.25, "rank": 1, "decoded_token": engine.tokenizer.token_text(prompt[-1])}
        assert (other["logprob"], other["rank"]) == (-1.0, 2)


def test_echo_and_prompt_logprobs_ask_for_what_each_needs(client, engine):
    choice = post(client, "abc", echo=True, logprobs=1, prompt_logprobs=3, max_tokens=0).json()["choices"][0]
    assert [len(top or ()) for top in choice["logprobs"]["top_logprobs"]] == [0, 1, 1]
    assert [len(top or ()) for top in choice["prompt_logprobs"]] == [0, 3, 3]


def test_obfuscation_rounds_lengths_up(client, engine):
    plain = post(client, stream=True, max_tokens=12)
    padded = post(client, stream=True, max_tokens=12, stream_options={"include_obfuscation": True})
    assert joined(events(padded), 0) == joined(events(plain), 0)
    assert all("obfuscation" in event for event in events(padded))
    assert {len(line) % 64 for line in padded.content.split(b"\n\n")[:-2]} == {62}


def test_the_middle_is_filled_in_where_the_model_has_tokens_for_it(client, engine, launch, store_url):
    error = post(client, suffix="x").json()["error"]
    assert (error["param"], error["code"]) == ("suffix", "unsupported_parameter")
    specials = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    coder = launch.engine(store_url, tokenizer_files(*specials), id="coder")
    gateway = launch.gateway(store_url)
    with gateway.client() as other:
        launch.eventually(lambda: other.get("/v1/models/coder").json().get("status") == "ready")
        for prompt in ("ab", ""):
            other.post("/v1/completions", json={"model": "coder", "prompt": prompt, "suffix": " cd", "max_tokens": 1})
    before, behind, middle = map(coder.tokenizer.control_tokens.get, specials)
    encode = coder.tokenizer.encode
    assert [c.request.prompt for c in coder.seen] == [
        [before, *encode(prompt), behind, *encode(" cd"), middle] for prompt in ("ab", "")
    ]


REFUSED = [
    ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt"), ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": [1.5]}, "prompt"), ({"prompt": [True]}, "prompt"), ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**6]}, "prompt"), ({"prompt": ["a"] * 129}, "prompt"), ({"prompt": ["a"] * 65, "n": 2}, "n"),
    ({"logprobs": 21}, "logprobs"), ({"logprobs": True}, "logprobs"), ({"max_tokens": 0}, "max_tokens"),
    ({"n": 3, "best_of": 2}, "best_of"), ({"best_of": 3, "stream": True}, "best_of"),
    ({"prompt": ["a"] * 65, "best_of": 2}, "best_of"), ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"), ({"suffix": "x", "echo": True}, "suffix"),
    ({"suffix": "x"}, "suffix"), ({"echo": "yes"}, "echo"),
    ({"messages": []}, "messages"), ({"response_format": {"type": "yaml"}}, "response_format.type"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_refused_is_named(client, engine, fields, param):
    response = post(client, **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not engine.seen


def test_missing_prompt_is_named(client):
    response = client.post("/v1/completions", json={"model": "tiny"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


def test_context_boundary_is_exact(client, engine):
    limit = engine.card.max_model_len
    fits = post(client, [5] * (limit - 1), max_tokens=1)
    assert fits.status_code == 200 and fits.json()["usage"]["total_tokens"] == limit
    for prompt, wanted in (([5] * limit, 1), ([5] * (limit - 1), 2), ([5] * (limit + 1), None)):
        error = post(client, prompt, max_tokens=wanted).json()["error"]
        assert error["code"] == "context_length_exceeded" and str(limit) in error["message"]
