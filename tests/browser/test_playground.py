"""The playground in a real browser, on a real engine."""

from __future__ import annotations

import re

from playwright.sync_api import Page, expect

from tests.browser.conftest import Watched, serious
from tests.test_end_to_end import Served

QUESTION = "Is this a SECRET question?"
NOTE_LENGTHS = """() => {
  window.lengths = [];
  new MutationObserver(() => {
    const said = document.querySelector(".turn.assistant.growing .said");
    if (said && said.textContent.length !== window.lengths.at(-1)) window.lengths.push(said.textContent.length);
  }).observe(document.getElementById("turns"), { childList: true, subtree: true });
}"""
"""Keeps the lengths that an answer is seen to have while it grows."""


def enter(watched: Watched, key: str) -> Page:
    page = watched.page
    page.goto(f"{watched.origin}/playground")
    page.get_by_label("Key", exact=True).fill(key)
    page.keyboard.press("Enter")
    return page


def test_a_chat_streams_and_its_figures_are_the_servers(watched: Watched, served: Served) -> None:
    page = enter(watched, served.key)
    expect(page.locator("#model")).to_have_value("tiny")
    page.evaluate(NOTE_LENGTHS)
    page.get_by_label("Max tokens").fill("250")
    page.get_by_label("Temperature", exact=True).fill("0")
    page.get_by_label("Your message").fill(QUESTION)
    page.keyboard.press("Enter")
    figures = page.locator(".turn.assistant:not(.growing) .figures")
    shown = re.compile(r"first token .+ tokens/s [\d.]+ .*prompt \d+.*output \d+.*total")
    expect(figures).to_have_text(shown, timeout=60_000)
    told = re.search(r"output (\d+)", figures.text_content() or "")
    # Every token of this model is a character; markup takes some away.
    assert told and int(told[1]) <= 250
    lengths = page.evaluate("() => window.lengths")
    # Not sorted: markup that is complete takes its marks out of the text.
    assert len(lengths) >= 2 and lengths[0] < lengths[-1], "it is shown while it comes"
    expect(page.locator("#status")).to_contain_text(f"{told[1]} tokens")
    assert serious(page) == []

    page.get_by_label("Your message").fill("And then?")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".turn")).to_have_count(4)
    expect(page.locator(".turn.growing")).to_have_count(0)
    assert [url for url in watched.urls if served.key in url or "SECRET" in url] == []


def test_an_answer_is_stopped_by_the_keyboard(watched: Watched, served: Served) -> None:
    page = enter(watched, served.key)
    expect(page.locator("#model")).to_have_value("tiny")
    page.get_by_label("Max tokens").fill("1900")
    page.get_by_label("Temperature", exact=True).fill("0")
    page.get_by_label("Your message").fill("Go on.")
    page.keyboard.press("Enter")
    expect(page.locator(".turn.assistant.growing .said")).to_have_text(re.compile(r".{10}"))
    page.keyboard.press("Escape")
    expect(page.locator(".turn.assistant .figures")).to_contain_text("ended by you")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_role("heading", name="Ask a model")).to_be_visible()


def test_the_code_has_what_the_page_asks_for_and_no_key(watched: Watched, served: Served) -> None:
    page = enter(watched, served.key)
    expect(page.locator("#model")).to_have_value("tiny")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Top k").fill("5")
    page.get_by_label("System message").fill("It's 'so'.")
    page.get_by_label("Your message").fill(QUESTION)
    page.get_by_role("button", name="View code").click()
    code = page.locator("#code")
    for language, parts in {
        "Python": ('os.environ["NORIA_API_KEY"]', "seed=7", 'extra_body={"top_k": 5}', "stream=True", QUESTION),
        "Node": ("process.env.NORIA_API_KEY", "seed: 7", "top_k: 5", "stream: true", QUESTION),
        "curl": ("Bearer $NORIA_API_KEY", '"seed": 7', '"top_k": 5', "It'\\''s '\\''so'\\''.", QUESTION),
    }.items():
        page.get_by_role("tab", name=language).click()
        for part in (*parts, f"{watched.origin}/v1"):
            expect(code).to_contain_text(part)
        assert served.key not in (code.text_content() or "")
    assert serious(page) == []
    page.get_by_role("tab", name="Python").click()
    compile(code.text_content() or "", "snippet", "exec")


def test_a_wrong_key_is_told_and_asked_for_again(watched: Watched, served: Served) -> None:
    page = enter(watched, "sk-wrong")
    expect(page.locator("#key-reason")).to_contain_text("Incorrect API key")
    page.get_by_label("Key", exact=True).fill(served.key)
    page.keyboard.press("Enter")
    expect(page.locator("#model")).to_have_value("tiny")
    kept = page.evaluate("() => [JSON.stringify(localStorage), document.cookie]")
    assert kept == ["{}", ""]
    page.reload()
    expect(page.locator("#model")).to_have_value("tiny")  # this tab knows the key yet


def test_a_request_that_is_refused_says_why(watched: Watched, served: Served) -> None:
    page = enter(watched, served.key)
    expect(page.locator("#model")).to_have_value("tiny")
    page.get_by_label("Max tokens").fill("5000")
    page.get_by_label("Your message").fill("Hello")
    page.keyboard.press("Enter")
    alert = page.get_by_role("alert").filter(has_text="400")
    expect(alert).to_contain_text("context_length_exceeded")


def test_it_can_be_read_on_a_phone(watched: Watched, served: Served) -> None:
    watched.page.set_viewport_size({"width": 360, "height": 720})
    page = enter(watched, served.key)
    expect(page.locator("#model")).to_have_value("tiny")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 360
    expect(page.get_by_label("Temperature", exact=True)).to_be_hidden()
    page.get_by_role("button", name="Parameters").click()
    expect(page.get_by_label("Temperature", exact=True)).to_be_visible()
