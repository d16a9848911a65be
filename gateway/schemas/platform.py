"""Fields that speak to OpenAI's platform around a model, and what they mean on a server that has a part of it.

Knows no endpoint.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from noria.gateway.schemas.strict import Strict


class PromptCacheOptions(Strict):
    """The prefix cache is implicit, and keeps what the memory holds."""

    mode: Literal["implicit"] | None = None
    ttl: Literal["30m"] | None = None


class Score(Strict):
    mode: Literal["score"]


class ModerationPolicy(Strict):
    input: Score | None = None
    output: Score | None = None


class Moderation(Strict):
    """There is no moderation model here: scores are answered with an error inside the answer, and `block`, which would
    have to keep something back, is refused."""

    model: str = Field(min_length=1, max_length=256)
    policy: ModerationPolicy | None = None


_NO_MODERATION = {
    "type": "error",
    "code": "moderation_unavailable",
    "message": "This server has no moderation model.",
}


def moderated() -> dict[str, Any]:
    """What an answer says where `moderation` was asked for."""
    return {"input": _NO_MODERATION, "output": _NO_MODERATION}
