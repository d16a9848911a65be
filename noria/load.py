"""Load on any server that speaks OpenAI's API: requests over HTTP, and when their tokens came.

Knows HTTP and what streams look like; nothing of options and tables, nor which server it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from time import perf_counter
from typing import Any

import aiohttp
import orjson

from noria.replay import Arrival, percentile

WORDS = [
    "river", "stone", "green", "winter", "music", "paper", "table", "light", "garden", "bread", "horse", "water",
    "north", "silver", "window", "friend", "small", "road", "summer", "letter", "house", "yellow", "morning",
    "island", "train", "market", "simple", "forest", "field", "voice", "bridge", "story", "kitchen", "long", "bird",
    "color", "floor", "village", "early", "heavy", "doctor", "open", "rain", "sweet", "captain", "wall", "black",
    "orange", "ship", "warm", "coffee", "travel", "quiet", "valley", "glass", "strong", "mountain", "white",
    "number", "pocket", "round",
]  # fmt: skip
"""Words that most vocabularies have as one token, with the space before them."""

SHORT, LONG = 8, 40
"""Words of the two prompts that tell how many tokens a word is."""

Done = Callable[["Outcome"], None]


class LoadError(Exception):
    """The server cannot be measured: one line for a person."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and what to add to each body."""

    base_url: str  # with its /v1
    model: str
    chat: bool
    headers: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"{self.base_url}/chat/completions" if self.chat else f"{self.base_url}/completions"

    def body(self, prompt: str, max_tokens: int, *, stream: bool) -> bytes:
        asked = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        streamed = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        return orjson.dumps(
            {"model": self.model, **asked, "max_tokens": max_tokens, "temperature": 0, **streamed, **self.extra}
        )


@dataclass(slots=True)
class Outcome:
    """What came back of one request. Times are of `perf_counter`; `error` is empty where the stream ended well."""

    started: float
    ended: float = 0.0
    token_times: list[float] = field(default_factory=list)  # of events with text; one may hold several tokens
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts of so many tokens, of words, by what the server counted in two of them."""

    overhead: float  # tokens of a prompt of no words: its template
    per_word: float
    seed: str

    def of(self, num_tokens: int, name: str) -> str:
        """Differs from its first word on by `name` and `seed`: no prefix cache knows it."""
        chance = Random(f"{self.seed}/{name}")
        return " ".join(
            chance.choice(WORDS) for _ in range(max(1, round((num_tokens - self.overhead) / self.per_word)))
        )


class Client:
    """One session with one server."""

    def __init__(self, session: aiohttp.ClientSession, target: Target, prompts: Prompts) -> None:
        self._session, self._target, self._prompts = session, target, prompts

    async def send(self, arrival: Arrival) -> Outcome:
        """Stream one request to its end. Never raises but for cancellation."""
        body = self._target.body(self._prompts.of(arrival.prompt, arrival.name), arrival.output, stream=True)
        outcome = Outcome(perf_counter())
        try:
            async with self._session.post(self._target.url, data=body, headers=self._target.headers) as response:
                if response.status != 200:
                    outcome.error = _error_of(response.status, await response.read())
                else:
                    await _read(response, outcome)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            outcome.error = f"{type(error).__name__}: {error}".rstrip(": ")
        outcome.ended = perf_counter()
        return outcome

    async def closed_loop(self, arrivals: Sequence[Arrival], concurrency: int, done: Done) -> list[Outcome]:
        """So many at once, the next as soon as one ended."""
        waiting = iter(arrivals)

        async def one_client() -> list[Outcome]:
            mine = []
            for arrival in waiting:
                mine.append(await self.send(arrival))
                done(mine[-1])
            return mine

        return [
            outcome for mine in await asyncio.gather(*(one_client() for _ in range(concurrency))) for outcome in mine
        ]

    async def open_loop(self, arrivals: Sequence[Arrival], done: Done) -> list[Outcome]:
        """Each when it arrives, however many run."""
        began = perf_counter()

        async def one(arrival: Arrival) -> Outcome:
            await asyncio.sleep(began + arrival.seconds - perf_counter())
            outcome = await self.send(arrival)
            done(outcome)
            return outcome

        return list(await asyncio.gather(*map(one, arrivals)))


def open_session(patience: float) -> aiohttp.ClientSession:
    """A connection for each request: there are servers that close a kept one just as the next request goes out.
    `patience`: seconds without a byte after which a request failed."""
    limits = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=patience)
    return aiohttp.ClientSession(timeout=limits, connector=aiohttp.TCPConnector(limit=0, force_close=True))


async def first_model(session: aiohttp.ClientSession, base_url: str, headers: Mapping[str, str]) -> str:
    """The first model that the server lists. Raises LoadError."""
    try:
        async with session.get(f"{base_url}/models", headers=headers) as response:
            body = await response.read()
            if response.status != 200:
                raise LoadError(_error_of(response.status, body))
        return str(orjson.loads(body)["data"][0]["id"])
    except aiohttp.ClientError as error:
        raise LoadError(f"{base_url} cannot be reached ({_reason(error)}): name a server with --base-url") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise LoadError(f"{base_url}/models lists no model: name one with --model") from None


async def calibrate(session: aiohttp.ClientSession, target: Target, seed: str) -> Prompts:
    """Ask twice for one token, and read from the usage what a word costs. Raises LoadError."""
    words = Prompts(0, 1, seed)
    short, long = [await _count(session, target, words.of(number, f"probe{number}")) for number in (SHORT, LONG)]
    per_word = (long - short) / (LONG - SHORT)
    if per_word <= 0:
        raise LoadError(f"the server counts {short} and {long} prompt tokens for {SHORT} and {LONG} words")
    return Prompts(short - SHORT * per_word, per_word, seed)


async def takes(session: aiohttp.ClientSession, target: Target) -> bool:
    """Whether the server takes such a body, with its extras."""
    async with session.post(target.url, data=target.body("a", 1, stream=False), headers=target.headers) as response:
        await response.read()
        return response.status == 200


async def _count(session: aiohttp.ClientSession, target: Target, prompt: str) -> int:
    try:
        body = target.body(prompt, 1, stream=False)
        async with session.post(target.url, data=body, headers=target.headers) as response:
            answer = await response.read()
            if response.status != 200:
                raise LoadError(_error_of(response.status, answer))
        return int(orjson.loads(answer)["usage"]["prompt_tokens"])
    except (aiohttp.ClientError, TimeoutError) as error:
        raise LoadError(f"{target.url} cannot be reached: {_reason(error)}") from None
    except (ValueError, KeyError, TypeError):
        raise LoadError(f"{target.url} answers without usage.prompt_tokens") from None


def _reason(error: Exception) -> str:
    """Of a connection that failed, without the client's words about its sockets."""
    return str(getattr(error, "strerror", None) or error) or type(error).__name__


async def _read(response: aiohttp.ClientResponse, outcome: Outcome) -> None:
    ended = False
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            ended = True
            continue
        event = orjson.loads(data)
        if "error" in event:
            outcome.error = _error_of(200, data)
            return
        ended = ended or any(choice.get("finish_reason") for choice in event.get("choices") or ())
        if any(_texts(event)):
            outcome.token_times.append(perf_counter())
        if usage := event.get("usage"):
            outcome.prompt_tokens, outcome.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    if not ended:
        outcome.error = "the stream was cut off"
    outcome.output_tokens = outcome.output_tokens or len(outcome.token_times)


def _texts(event: Mapping[str, Any]) -> Iterator[Any]:
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or choice
        yield from (delta.get(name) for name in ("content", "text", "reasoning_content", "reasoning", "tool_calls"))


def _error_of(status: int, body: bytes) -> str:
    try:
        message = orjson.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode(errors="replace")
    return f"{status} {message}"


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The figures of one load by name, times in seconds; of requests that ended well, but for `failed` and `errors`.
    Throughput is over the whole run, its start and its end included."""
    good = [outcome for outcome in outcomes if not outcome.error and outcome.output_tokens]
    errors = sorted({outcome.error or "no token came" for outcome in outcomes if outcome not in good})
    found: dict[str, Any] = {"requests": len(outcomes), "failed": len(outcomes) - len(good), "errors": errors}
    if not good:
        return found
    seconds = max(outcome.ended for outcome in outcomes) - min(outcome.started for outcome in outcomes)
    prompt_tokens = sum(outcome.prompt_tokens for outcome in good)
    output_tokens = sum(outcome.output_tokens for outcome in good)
    times = {
        "time_to_first_token": [o.token_times[0] - o.started for o in good if o.token_times],
        "inter_token": [b - a for o in good for a, b in zip(o.token_times, o.token_times[1:], strict=False)],
        "latency_per_token": [(o.ended - o.started) / o.output_tokens for o in good],
        "latency": [o.ended - o.started for o in good],
    }
    return {
        **found,
        "seconds": seconds,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "tokens_per_second": output_tokens / seconds,
        "requests_per_second": len(good) / seconds,
        **{f"{name}_median": percentile(values or [0.0], 0.5) for name, values in times.items()},
        **{f"{name}_p99": percentile(values or [0.0], 0.99) for name, values in times.items()},
    }
