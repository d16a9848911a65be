"""Random requests of chat completions, completions and responses, with every option that shapes an answer.

The same for the same seed. Knows names and ranges of fields; no server and no answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.schema_suite import closed

Body = dict[str, Any]

_WORDS = (
    "river",
    "wheel",
    "bucket",
    "naïve",
    "日本語",
    "🎉",
    "x = 1;",
    "the",
    "and then",
    "\n\n",
    '"quoted"',
    "2 + 2 =",
)
_STOPS = ("e", " the", "\n", ".", "ing", ",", "a", "}", "ou", "\u200d", "zq", '":')
_SHAPES = (
    closed(colour={"enum": ["red", "grün", "青"]}, count={"type": "integer", "minimum": 0, "maximum": 99}),
    closed(name={"type": "string", "maxLength": 6}, ok={"type": "boolean"}),
    {"type": "array", "items": {"enum": [1, "two", None]}, "maxItems": 3},
)
_ASCII_SHAPES = (
    closed(colour={"enum": ["red", "green"]}, count={"type": "integer", "minimum": 0, "maximum": 99}),
    *_SHAPES[1:],
)
_GRAMMAR = 'root ::= "yes" | "no" | [0-9] [0-9] root'


@dataclass(frozen=True)
class Ask:
    """One request, without `stream`. `resumable`: its stream is asked for with event ids."""

    path: str
    body: Body
    resumable: bool = False


class RandomRequests:
    """Requests to one model. `max_tokens` bounds each answer; forms and calls get twice as much."""

    def __init__(self, model: str, vocab_size: int, *, seed: int, max_tokens: int = 16) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._chance = random.Random(seed)
        self._max_tokens = max_tokens
        # What a vocabulary without all bytes cannot write is a dead end for its model.
        self._bytes = vocab_size >= 256
        self._shapes = _SHAPES if self._bytes else _ASCII_SHAPES

    def ask(self) -> Ask:
        """The next one."""
        make = self._chance.choices((self._chat, self._completion, self._response), (5, 3, 3))[0]
        ask = make()
        return Ask(ask.path, {"model": self._model, **ask.body}, ask.resumable)

    def _chat(self) -> Ask:
        body: Body = {"messages": self._messages(), "max_tokens": self._tokens()} | self._sampling() | self._extras()
        self._maybe(body, 0.4, n=lambda: self._chance.choice((1, 2, 3)))
        if self._chance.random() < 0.4:
            body["logprobs"] = True
            self._maybe(body, 0.8, top_logprobs=lambda: self._chance.randint(0, 5))
            self._maybe(body, 0.2, return_tokens_as_token_ids=lambda: True)
        self._maybe(
            body, 0.1,
            verbosity=lambda: self._chance.choice(("low", "medium", "high")),
            prediction=lambda: {"type": "content", "content": self._text()},
            reasoning_effort=lambda: "low",
            service_tier=lambda: self._chance.choice(("auto", "default", "flex", "priority")),
            metadata=lambda: {"a": "b"},
        )  # fmt: skip
        form = self._chance.random()
        if form < 0.35:
            body |= self._tools()
        if form > 0.65 or form < 0.08:
            body |= self._form(body)
        return Ask("/v1/chat/completions", body, resumable=self._chance.random() < 0.2)

    def _completion(self) -> Ask:
        body: Body = {"prompt": self._prompt(), "max_tokens": self._tokens()} | self._sampling() | self._extras()
        self._maybe(body, 0.3, n=lambda: 2, echo=lambda: True, logprobs=lambda: self._chance.randint(0, 5))
        self._maybe(body, 0.15, prompt_logprobs=lambda: self._chance.randint(0, 3), truncate_prompt_tokens=lambda: 5)
        if body.get("echo") and self._chance.random() < 0.2:
            body["max_tokens"] = 0
            body.pop("min_tokens", None)
        elif self._chance.random() < 0.25:
            body |= self._form(body)
        return Ask("/v1/completions", body, resumable=self._chance.random() < 0.2)

    def _response(self) -> Ask:
        body: Body = {"input": self._chance.choice((self._text(), self._messages())), "store": self._rarely()}
        body |= {"max_output_tokens": max(16, self._tokens())} | self._sampling(responses=True)
        if self._chance.random() < 0.4:
            body |= {"include": ["message.output_text.logprobs"], "top_logprobs": self._chance.randint(0, 5)}
        self._maybe(
            body, 0.15, instructions=self._text, metadata=lambda: {"k": "v"}, truncation=lambda: "auto",
            reasoning=lambda: {"effort": "low"}, user=lambda: "u",
        )  # fmt: skip
        form = self._chance.random()
        if form < 0.35:
            chat = self._tools(legacy=False)
            body["tools"] = [{"type": "function", **tool["function"]} for tool in chat["tools"]]
            choice = chat.get("tool_choice", "auto")
            body["tool_choice"] = choice if isinstance(choice, str) else {"type": "function", **choice["function"]}
            self._maybe(body, 0.3, parallel_tool_calls=self._rarely)
        elif form < 0.6:
            schema = {"type": "json_schema", "name": "s", "schema": self._chance.choice(self._shapes[:2])}
            body["text"] = {"format": self._chance.choice(({"type": "json_object"}, schema))}
            body["max_output_tokens"] = 2 * self._max_tokens
        return Ask("/v1/responses", body)

    # --- parts ----------------------------------------------------------------------------------------------------

    def _sampling(self, *, responses: bool = False) -> Body:
        pick = self._chance
        greedy = pick.random() < 0.3
        body: Body = (
            {"temperature": 0} if greedy else {"temperature": pick.choice((0.3, 1, 1.5)), "seed": pick.getrandbits(32)}
        )
        self._maybe(
            body, 0.25,
            top_p=lambda: pick.choice((0.0, 0.5, 0.9)), top_k=lambda: pick.choice((-1, 1, 5, 40)),
            min_p=lambda: pick.choice((0.02, 0.3)), presence_penalty=lambda: pick.choice((-1, 0.5, 2)),
            frequency_penalty=lambda: pick.choice((-0.5, 1.5)), repetition_penalty=lambda: pick.choice((0.8, 1.3)),
            priority=lambda: pick.randint(-3, 3),
        )  # fmt: skip
        if pick.random() < 0.35:
            body["stop"] = pick.choice((pick.choice(_STOPS), pick.sample(_STOPS, pick.randint(1, 4))))
        if not responses:
            self._maybe(body, 0.2, logit_bias=self._bias)
        return body

    def _extras(self) -> Body:
        """Fields that are vLLM's."""
        pick, body = self._chance, Body()
        self._maybe(
            body, 0.2,
            min_tokens=lambda: pick.randint(0, 3), ignore_eos=self._rarely, return_token_ids=lambda: True,
            stop_token_ids=lambda: [self._id() for _ in range(pick.randint(1, 30))],
            skip_special_tokens=self._rarely, include_stop_str_in_output=lambda: True, cache_salt=lambda: "salt",
        )  # fmt: skip
        return body

    def _tools(self, *, legacy: bool | None = None) -> Body:
        functions = [
            {"name": "paint", "description": "Paint it", "parameters": self._shapes[0], "strict": self._rarely()},
            {"name": "look_up", "parameters": self._shapes[1]},
            {"name": "stop_now"},
        ][: self._chance.randint(1, 3)]
        name = self._chance.choice(functions)["name"]
        kind = self._chance.choice(("none", "auto", "forced", "named", "named"))
        if legacy if legacy is not None else self._chance.random() < 0.2:
            return {"functions": functions, "function_call": {"name": name} if kind == "named" else "auto"}
        body: Body = {"tools": [{"type": "function", "function": function} for function in functions]}
        named = {"type": "function", "function": {"name": name}}
        body["tool_choice"] = {"forced": "required", "named": named}.get(kind, kind)
        self._maybe(body, 0.3, parallel_tool_calls=self._rarely)
        return body | {"max_tokens": 2 * self._max_tokens}

    def _form(self, body: Body) -> Body:
        pick = self._chance
        schema = {"name": "s", "schema": pick.choice(self._shapes), "strict": True}
        forms: list[Body] = [
            {"response_format": {"type": "json_object"}},
            {"response_format": {"type": "json_schema", "json_schema": schema}},
            {"guided_json": pick.choice(self._shapes)},
            {"guided_regex": "[a-c]{2,5}(é|z+)?" if self._bytes else "[a-c]{2,5}z*"},
            {"guided_choice": ["yes", "nein", "おそらく" if self._bytes else "maybe"]},
            {"guided_grammar": _GRAMMAR},
            {"structured_outputs": {"regex": "\\d{1,3}[.]\\d"}},
        ]
        return {**pick.choice(forms), "max_tokens": 2 * self._max_tokens}

    def _messages(self) -> list[Body]:
        turns: list[Body] = [{"role": "system", "content": self._text()}] if self._rarely() else []
        if self._rarely():
            turns += [{"role": "user", "content": self._text()}, {"role": "assistant", "content": self._text()}]
        return [*turns, {"role": "user", "content": self._text()}]

    def _prompt(self) -> Any:
        ids = [self._id() for _ in range(self._chance.randint(1, 8))]
        return self._chance.choice((self._text(), self._text(), [self._text(), self._text()], ids, [ids, ids[:1]]))

    def _text(self) -> str:
        return " ".join(self._chance.choices(_WORDS, k=self._chance.randint(1, 8)))

    def _tokens(self) -> int:
        return self._chance.randint(1, self._max_tokens)

    def _id(self) -> int:
        return self._chance.randrange(self._vocab_size)

    def _bias(self) -> Body:
        return {str(self._id()): self._chance.choice((-100, -3, 2.5, 8)) for _ in range(self._chance.randint(1, 6))}

    def _rarely(self) -> bool:
        return self._chance.random() < 0.3

    def _maybe(self, body: Body, chance: float, **fields: Callable[[], Any]) -> None:
        """Put each field into the body with this chance."""
        for name, make in fields.items():
            if self._chance.random() < chance:
                body[name] = make()
