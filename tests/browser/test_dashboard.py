"""The dashboard in a real browser: who may come in, the wheel that turns, the sections beside it."""

from __future__ import annotations

import re

from playwright.sync_api import Page, expect

from tests.browser.conftest import Watched, endless_request, serious
from tests.test_end_to_end import Served


def enter(watched: Watched, key: str) -> Page:
    page = watched.page
    page.goto(f"{watched.origin}/dashboard")
    page.get_by_label("Admin key").fill(key)
    page.keyboard.press("Enter")
    return page


def painted(page: Page) -> int:
    """How many pixels of the wheel have a colour that is no shade of grey: those of requests."""
    return int(
        page.evaluate(
            """() => {
              const canvas = document.querySelector(".wheel canvas");
              const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
              let found = 0;
              for (let i = 0; i < data.length; i += 4) {
                const [r, g, b] = data.subarray(i, i + 3);
                if (Math.max(r, g, b) - Math.min(r, g, b) > 24) found += 1;
              }
              return found;
            }"""
        )
    )


def test_a_request_appears_in_the_wheel_and_leaves(
    watched: Watched, origin: str, served: Served, admin_key: str
) -> None:
    page = enter(watched, admin_key)
    batch = page.get_by_role("group", name="Requests in the batch")
    expect(batch).to_contain_text("The batch is empty.")
    assert painted(page) == 0
    row = batch.locator("tr[data-request]")
    with endless_request(origin, served.key):
        expect(row).to_have_count(1)
        expect(row).to_contain_text("of 1\u202f900 at most")
        expect(page.get_by_text("slots 1 of")).to_be_visible()
        assert painted(page) > 100
        # The mark in the bar turns on with every iteration.
        assert page.evaluate("() => parseFloat(document.getElementById('mark').style.rotate)") >= 60
    expect(row).to_have_count(0)
    assert painted(page) > 100, "what was done is still to be seen"
    assert [url for url in watched.urls if served.key in url or admin_key in url] == []
    expect(page.locator("#engines")).to_contain_text("live")
    expect(page.locator("#latency")).to_contain_text("First token")
    assert serious(page) == []


def test_a_key_is_made_used_and_revoked(watched: Watched, admin_key: str) -> None:
    page = enter(watched, admin_key)
    page.get_by_role("link", name="Keys").click()
    page.get_by_role("button", name="New key").click()
    page.get_by_label("Name").fill("of the browser")
    page.get_by_label("Requests a minute").fill("600")
    assert serious(page) == []
    page.get_by_role("button", name="Create").click()
    expect(page.locator("#secret")).to_have_text(re.compile("^sk-noria-"))
    secret = page.locator("#secret").text_content() or ""
    page.get_by_role("button", name="Done").click()
    row = page.locator("tr[data-key]").filter(has_text="of the browser")
    expect(row).to_contain_text("Requests a minute 600")
    assert secret not in page.content(), "it is shown once"
    assert serious(page) == []

    playground = page.context.new_page()
    playground.goto(f"{watched.origin}/playground")
    playground.get_by_label("Key", exact=True).fill(secret)
    playground.keyboard.press("Enter")
    expect(playground.locator("#model")).to_have_value("tiny")
    playground.get_by_label("Max tokens").fill("8")
    playground.get_by_label("Your message").fill("Hello")
    playground.keyboard.press("Enter")
    expect(playground.locator(".turn.assistant .figures")).to_contain_text("ended by")

    row.get_by_role("button", name="Revoke").click()
    page.locator("#confirm-yes").click()
    expect(row).to_have_count(0)
    playground.wait_for_timeout(1000)  # within a second at every gateway
    playground.get_by_label("Your message").fill("Hello again")
    playground.keyboard.press("Enter")
    expect(playground.locator("#key-reason")).to_contain_text("Incorrect API key")
    expect(playground.locator(".turn.assistant").last).to_contain_text("401 invalid_api_key")

    page.get_by_role("link", name="Usage").click()
    expect(page.locator("#usage-body tbody tr")).to_contain_text("default")
    assert serious(page) == []
    assert [url for url in watched.urls if secret in url] == []


def test_a_wrong_key_stays_outside(watched: Watched) -> None:
    page = enter(watched, "sk-wrong")
    expect(page.get_by_role("alert")).to_contain_text("Incorrect API key")
    expect(page.locator("#inside")).to_be_hidden()
    assert page.evaluate("() => sessionStorage.length") == 0
    assert serious(page) == []


def test_signing_out_forgets_the_key(watched: Watched, admin_key: str) -> None:
    page = enter(watched, admin_key)
    expect(page.get_by_role("link", name="Dead letters")).to_be_visible()
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("Admin key")).to_be_focused()
    assert page.evaluate("() => sessionStorage.length") == 0
    page.reload()
    expect(page.get_by_label("Admin key")).to_be_visible()


def test_sections_are_addresses_and_fit_a_phone(watched: Watched, admin_key: str) -> None:
    watched.page.set_viewport_size({"width": 360, "height": 720})
    page = enter(watched, admin_key)
    page.get_by_role("link", name="Dead letters").click()
    expect(page.locator("#letters")).to_contain_text("There are none.")
    page.reload()
    expect(page.locator("#letters")).to_contain_text("There are none.")
    page.get_by_role("link", name="Overview").click()
    expect(page.locator("#tiles")).to_contain_text("KV memory")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 360
