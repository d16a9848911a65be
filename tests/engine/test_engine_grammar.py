"""Requests with a grammar in the loop: shaped, waited for, ended, handed on."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from noria.engine.grammar.grammars import Grammars
from noria.engine.grammar.matcher import CompiledGrammar
from noria.engine.wire.messages import Grammar
from tests.engine.small_engine import CARD, EOS, FILES, TOKENIZER, Client, RunningEngine


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    found = Grammars(FILES, vocab_size=CARD.vocab_size, stop_token_ids=CARD.eos_token_ids, seconds=20)
    yield found
    found.close()


class HeldGrammars(Grammars):
    """Its grammars are compiled for as long as the test wants; `begun` are those whose turn comes at once."""

    def __init__(self, real: Grammars, begun: tuple[str, ...] = (), patience: float = 60) -> None:
        super().__init__(FILES, vocab_size=CARD.vocab_size, stop_token_ids=CARD.eos_token_ids, seconds=20)
        self._begun = begun
        self._patience = patience
        self._real = real
        self._held: list[tuple[Future[CompiledGrammar], Grammar]] = []

    @property
    def patience(self) -> float:
        return self._patience

    @property
    def given_up(self) -> list[str]:
        return [grammar.text for future, grammar in self._held if future.cancelled()]

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        future: Future[CompiledGrammar] = Future()
        if grammar.text in self._begun:
            future.set_running_or_notify_cancel()
        self._held.append((future, grammar))
        return future

    def release(self) -> None:
        for future, grammar in self._held:
            if not future.cancelled():
                future.set_result(self._real.compile(grammar).result(60))


def shaped(regex: str, **sampling: object) -> dict[str, object]:
    return {"max_tokens": 100, "grammar": Grammar("regex", regex, "guided_regex"), **sampling}


async def test_a_grammar_shapes_its_own_request_and_ends_it(client: Client, store: str, grammars: Grammars) -> None:
    running = RunningEngine(store, grammars=grammars)
    try:
        for i in range(3):
            await client.send(f"plain{i}", [10 * i], sampling={"max_tokens": 12})
            await client.send(f"shaped{i}", [5 + i], sampling=shaped("[a-z]{3}-[0-9]{2}", temperature=1, seed=i))
        await client.send("cut", [5], sampling=shaped("[a-z]+", max_tokens=4, temperature=1, logit_bias={EOS: -100.0}))
        # A fulfilled grammar ends its request whatever else says that it must go on.
        await client.send("on", [5], sampling=shaped("ab", min_tokens=50, ignore_eos=True))
        assert await client.ends(*(f"plain{i}" for i in range(3)), "cut") == ["length"] * 4
        assert await client.ends(*(f"shaped{i}" for i in range(3)), "on") == ["stop"] * 4
        for i in range(3):
            assert client.tokens[f"plain{i}"] == list(range(10 * i + 1, 10 * i + 13))
            *text, end = client.tokens[f"shaped{i}"]
            assert end == EOS and re.fullmatch("[a-z]{3}-[0-9]{2}", TOKENIZER.decode(text))
            assert max(text) < 256, "an id that the tokenizer does not know"
        assert client.tokens["on"] == [*TOKENIZER.encode("ab"), EOS]
        running.scheduler.check()
    finally:
        running.stop()


async def test_a_bad_grammar_ends_its_own_request_and_names_the_field(
    client: Client, store: str, grammars: Grammars
) -> None:
    running = RunningEngine(store, grammars=grammars)
    try:
        await client.send("bad", [5], sampling=shaped("(a"))
        await client.send("nothing", [5], sampling=shaped("a"), cache_salt="x")
        assert await client.ends("bad", "nothing") == ["error", "stop"]
        assert client.last["bad"].error_param == "guided_regex" and "parenthesis" in str(client.last["bad"].error)
    finally:
        running.stop()


async def test_who_waits_for_a_grammar_holds_up_nobody_and_can_be_ended(
    client: Client, store: str, grammars: Grammars
) -> None:
    held = HeldGrammars(grammars)
    running = RunningEngine(store, grammars=held)
    running.model.pace = 0.002
    try:
        await client.send("gone", [5], sampling=shaped("a"))
        await client.send("late", [5], sampling=shaped("b"), deadline_ms=int(time.time() * 1000) + 400)
        await client.send("patient", [5], sampling=shaped("[0-9]{4}"))
        await client.send("plain", [10], sampling={"max_tokens": 50})
        assert await client.ends("plain") == ["length"]
        assert running.engine.num_held >= 2 and "gone" not in client.last
        await client.broker.cancel("tiny", "gone")
        assert await client.ends("gone", "late") == ["cancelled", "expired"]
        assert held.given_up == ["a", "b"], "no turn is spent on what nobody waits for"
        await client.send("after", [20])
        assert await client.ends("after") == ["length"] and "patient" not in client.last
        held.release()
        assert await client.ends("patient") == ["stop"]
        assert running.engine.num_held == 0
    finally:
        running.stop()
        held.close()


async def test_a_turn_that_does_not_come_ends_a_request_and_one_that_has_come_does_not(
    client: Client, store: str, grammars: Grammars
) -> None:
    held = HeldGrammars(grammars, begun=("[0-9]{4}",), patience=0.2)
    running = RunningEngine(store, grammars=held)
    try:
        await client.send("begun", [5], sampling=shaped("[0-9]{4}"))
        await client.send("queued", [5], sampling=shaped("a"))
        assert await client.ends("queued") == ["overloaded"]
        assert held.given_up == ["a"] and "begun" not in client.last
        held.release()
        assert await client.ends("begun") == ["stop"]
    finally:
        running.stop()
        held.close()


async def test_a_drain_waits_for_a_grammar_and_hands_back_what_never_came(
    client: Client, store: str, grammars: Grammars
) -> None:
    held = HeldGrammars(grammars)
    first = RunningEngine(store, grammars=held)
    await client.send("r", [5], sampling=shaped("[0-9]{4}"))
    until = time.monotonic() + 10
    while first.engine.num_held == 0:
        assert time.monotonic() < until
        await asyncio.sleep(0.01)
    first.drain(0.2)
    first.join()
    first.broker.close()
    held.close()
    second = RunningEngine(store, grammars=grammars)
    try:
        assert await client.ends("r") == ["stop"]
    finally:
        second.stop()


async def test_another_engine_goes_on_in_the_middle_of_a_grammar(
    client: Client, store: str, grammars: Grammars
) -> None:
    sampling = shaped("([a-c][0-9]){30}", temperature=1, seed=3)
    first = RunningEngine(store, lease_seconds=0.6, grammars=grammars)
    await client.send("whole", [5], sampling=sampling)
    assert await client.ends("whole") == ["stop"]
    first.model.pace = 0.01
    await client.send("broken", [5], sampling=sampling)
    await client.read(lambda: len(client.tokens.get("broken", [])) > 10)
    first.halt()
    second = RunningEngine(store, grammars=grammars)
    try:
        while not await client.broker.reap("tiny"):
            pass
        assert await client.ends("broken") == ["stop"]
        assert len(client.tokens["broken"]) == 61
        assert client.tokens["broken"] == client.tokens["whole"]
    finally:
        second.stop()
        first.broker.close()
