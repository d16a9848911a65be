"""The pages and their files: what they may do in a browser, and that nothing else is served."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

STATIC = Path(__file__).parents[3] / "gateway" / "static"
PAGES = ["/playground", "/dashboard"]
FILES = sorted(path.name for path in STATIC.iterdir() if path.suffix != ".html")


@pytest.mark.parametrize("path", [*PAGES, *(f"/static/{name}" for name in FILES)])
def test_everything_is_there_without_a_key_and_under_a_strict_policy(gateway, path):
    with gateway.client(key=None) as client:
        answer = client.get(path)
        assert answer.status_code == 200 and answer.headers["x-content-type-options"] == "nosniff"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy and "*" not in policy and "http" not in policy
        again = client.get(path, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("path", PAGES)
def test_a_page_names_only_files_that_are_there(client, path):
    page = client.get(f"{path}/")  # with a slash, too
    named = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    assert len(named) >= 5
    for address in named:
        assert address.startswith("/") and client.get(address).status_code == 200
    assert not re.search(r"\son\w+=|style=|<style|javascript:", page.text), "the policy would refuse it"


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".js")])
def test_scripts_load_each_other_and_make_no_markup(name):
    text = (STATIC / name).read_text()
    for imported in re.findall(r'from "([^"]+)"', text):
        assert imported.removeprefix("./") in FILES or imported == "openai", imported
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    assert "http://" not in text and "https://" not in text


@pytest.mark.parametrize(
    "path", ["/static/", "/static/none.js", "/static/dashboard.html", "/static/..%2fapp.py", "/static/%2e%2e/app.py"]
)
def test_nothing_else_is_served(client, path):
    assert client.get(path).status_code == 404
