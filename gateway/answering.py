"""From a checked request to the response: a new generation or one that runs already, streamed or whole.

The same for every generating endpoint; knows no endpoint's shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
from fastapi import Request, Response

from noria.gateway.cursor import Cursor, MalformedId, resumed
from noria.gateway.delivery import Delivery
from noria.gateway.dependencies import until_client_leaves
from noria.gateway.errors import GatewayError, StreamNotFound
from noria.gateway.generation import Generation
from noria.gateway.queue_info import QueueInfo
from noria.gateway.services import Question, Services, Tenant
from noria.gateway.streaming import Events, EventStream
from noria.gateway.tickets import NOT_FOUND, IssuedTicket, new_record


@dataclass(frozen=True, slots=True)
class Identity:
    """What an answer is known by; the same however often it is given. `cursor` is there for a stream with event ids."""

    id: str
    created: int  # Unix seconds
    fingerprint: str
    cursor: Cursor | None


class Answer(Events, Protocol):
    """The shape that an endpoint gives to an answer."""

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """Runs the entered generation to its end; the body of an answer that is not streamed."""


async def respond(
    request: Request,
    services: Services,
    tenant: Tenant,
    delivery: Delivery,
    question: Question,
    prefix: str,
    shape: Callable[[Identity], Answer],
) -> Response:
    """The answer's response. `prefix` begins the answer's id. Raises a `GatewayError` where it is refused."""
    fingerprint = question.model.card.fingerprint
    ticket: IssuedTicket | None = None
    record = new_record(delivery, fingerprint)
    if delivery.logged:
        ticket = await services.tickets.issue(tenant.id, delivery, prefix, fingerprint, question.num_choices)
        record = ticket.record
    if ticket is None or not ticket.following:
        await _require_live(services, question, ticket)
    cursor = _cursor(delivery, ticket, question.num_choices)
    answer = shape(Identity(prefix + record.group, record.created, record.fingerprint, cursor))
    generation = _generation(services, tenant, question, record.group, ticket)
    queue_info = QueueInfo(services.broker, *generation.first_request) if delivery.queue_info else None
    if delivery.stream:
        open_streams, refusable = services.metrics.streams_open, question.has_grammar
        return EventStream(generation, answer, open_streams, queue_info, refusable=refusable)
    return await until_client_leaves(request, _whole(generation, answer, queue_info))


def _generation(
    services: Services, tenant: Tenant, question: Question, group: str, ticket: IssuedTicket | None
) -> Generation:
    try:
        return services.generation(tenant, question, group, ticket)
    except GatewayError as error:
        if ticket is not None and not ticket.following:
            services.lingering.lose(ticket, error)
        raise


async def _whole(generation: Generation, answer: Answer, queue_info: QueueInfo | None) -> Response:
    async with generation:
        headers = {} if queue_info is None else await queue_info.headers()
        body = await answer.whole(generation)
    return Response(orjson.dumps(body), headers=headers, media_type="application/json")


async def _require_live(services: Services, question: Question, ticket: IssuedTicket | None) -> None:
    try:
        services.directory.require_live(question.model)
    except GatewayError as error:
        if ticket is not None:
            services.lingering.lose(ticket, error)
        raise


def _cursor(delivery: Delivery, ticket: IssuedTicket | None, num_choices: int) -> Cursor | None:
    if ticket is None or not delivery.stream:
        return None
    if delivery.last_event is None:
        return Cursor(ticket.completion_id, num_choices)
    try:
        return resumed(delivery.last_event, num_choices)
    except MalformedId:
        raise StreamNotFound(NOT_FOUND, param="Last-Event-ID") from None
