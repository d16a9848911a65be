"""GET /v1/models and /v1/models/{id}, and what happens to names that are not served."""

from __future__ import annotations


def test_list_and_single(client):
    for prefix in ("/v1", ""):
        listed = client.get(f"{prefix}/models").json()
        assert listed["object"] == "list"
        model, alias = listed["data"]
        assert (model["id"], model["object"], model["owned_by"]) == ("tiny", "model", "noria")
        assert (model["created"], model["max_model_len"], model["status"]) == (1_700_000_000, 512, "ready")
        assert client.get(f"{prefix}/models/tiny").json() == model
        assert alias == {**model, "id": "tiny-alias"} and alias["root"] == model["root"] == "tiny"
        assert client.get(f"{prefix}/models/tiny-alias").json() == alias


def test_two_engines_side_by_side_are_told_apart_by_name(launch, own_port):
    launch.store(own_port)
    url = f"redis://127.0.0.1:{own_port}/0"
    for name, aliases in (("one", ("first", "both")), ("two", ("second", "one", "both"))):
        launch.engine(url, id=name, aliases=aliases, created=1 + len(aliases)).answer = f"I am {name}."
    gateway = launch.gateway(url)
    with gateway.client() as client:
        launch.eventually(lambda: len(client.get("/readyz").json().get("models", ())) == 2)
        answers = {}
        for name in ("one", "first", "two", "second", "both"):
            body = {"model": name, "messages": [{"role": "user", "content": "who?"}]}
            answer = client.post("/v1/chat/completions", json=body).json()
            answers[name] = (answer["model"], answer["choices"][0]["message"]["content"])
        one, two = ("one", "I am one."), ("two", "I am two.")
        assert answers == {"one": one, "first": one, "two": two, "second": two, "both": one}
        listed = {model["id"]: model["root"] for model in client.get("/v1/models").json()["data"]}
        assert listed == {"one": "one", "first": "one", "both": "one", "two": "two", "second": "two"}
        assert len(client.get("/v1/models").json()["data"]) == 5
        launch.parts("one").stop()
        launch.eventually(lambda: client.get("/readyz").json()["models"] == ["two"])
        body = {"model": "both", "prompt": "a", "max_tokens": 1}
        assert client.post("/v1/completions", json=body).json()["model"] == "two"
        assert client.post("/v1/completions", json={**body, "model": "one"}).status_code == 503


def test_unknown_is_404_everywhere(client):
    for response in (
        client.get("/v1/models/nope"),
        client.get("/v1/models/some/hub-id"),
        client.post("/v1/completions", json={"model": "nope", "prompt": "a"}),
        client.post(
            "/v1/chat/completions",
            json={"model": "nope", "stream": True, "messages": [{"role": "user", "content": "a"}]},
        ),
    ):
        assert response.status_code == 404
        error = response.json()["error"]
        assert (error["code"], error["param"], error["type"]) == ("model_not_found", "model", "invalid_request_error")


def test_an_alias_serves(client):
    response = client.post("/v1/completions", json={"model": "tiny-alias", "prompt": "a", "max_tokens": 1})
    assert response.json()["model"] == "tiny"


def test_a_model_that_cannot_hold_the_request_says_so(launch, own_port):
    launch.store(own_port)
    url = f"redis://127.0.0.1:{own_port}/0"
    launch.engine(url, kv_tokens=64)
    gateway = launch.gateway(url)
    with gateway.client() as client:
        launch.eventually(lambda: client.get("/readyz").status_code == 200)
        response = client.post("/v1/completions", json={"model": "tiny", "prompt": [5] * 60, "max_tokens": 10})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded" and "64" in error["message"] and "70" in error["message"]
