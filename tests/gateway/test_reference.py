"""The page and the document of the API cannot lie: compared with the routes, the schemas and OpenAI's own fields."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from noria.api_page import OPENAI_FIELDS as FIELDS_FILE
from noria.api_page import page
from noria.gateway.app import create_app
from noria.gateway.config import GatewaySettings
from noria.gateway.reference import BODIES, NO_JSON, document

ROOT = Path(__file__).parents[2]
OPENAI_FIELDS = json.loads(FIELDS_FILE.read_text())


@pytest.fixture(scope="module")
def app():
    return create_app(GatewaySettings())


def test_the_page_is_what_the_schemas_say(app):
    told = (ROOT / "docs" / "api.md").read_text()
    assert told == page(app, OPENAI_FIELDS), "run: python -m noria.api_page > docs/api.md"


def test_every_post_names_its_body(app):
    posts = {path for path, item in document(app)["paths"].items() if "post" in item}
    assert posts == BODIES.keys() | NO_JSON


@pytest.mark.parametrize("path", [key.removeprefix("POST ") for key in OPENAI_FIELDS])
def test_every_field_that_openai_documents_is_taken_or_refused_by_name(path):
    (kind,) = BODIES[f"/v1{path}"]
    taken = {field.alias or name for name, field in kind.model_fields.items()} | kind.refused.keys()
    assert set(OPENAI_FIELDS[f"POST {path}"]) - taken == set()


def test_the_document_is_closed_and_served(app, client):
    text = json.dumps(document(app))
    schemas = document(app)["components"]["schemas"]
    for reference in {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}:
        assert reference in schemas
    assert client.get("/openapi.json").json() == json.loads(text)


def test_the_document_needs_a_key(gateway):
    with gateway.client(key=None) as client:
        assert client.get("/openapi.json").status_code == 401
