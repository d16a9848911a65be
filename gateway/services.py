"""What the endpoints work with, made once per app and held together; and the making of a generation from it.

Knows no HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from noria.engine.wire.broker import GatewayBroker
from noria.engine.wire.messages import GenerationRequest, ModelCard, SamplingParams
from noria.engine.wire.record_store import RecordStore
from noria.gateway.batches.register import BatchRegister
from noria.gateway.choice import TextOptions
from noria.gateway.config import GatewaySettings
from noria.gateway.drain import Drain
from noria.gateway.errors import InvalidRequest
from noria.gateway.files import Files
from noria.gateway.generation import Generation
from noria.gateway.linger import Lingering
from noria.gateway.metrics import GatewayMetrics
from noria.gateway.model_directory import ModelDirectory, ServedModel
from noria.gateway.origin import Followed, Origin, Queued
from noria.gateway.pump import FramePump
from noria.gateway.reload import LiveSettings
from noria.gateway.sampling import seeds
from noria.gateway.schemas.sampling import SamplingFields
from noria.gateway.stored_completions import StoredCompletions
from noria.gateway.tenancy.admission import Admission, Caller, Part, output_limit
from noria.gateway.tenancy.tenancy import Tenancy
from noria.gateway.tickets import Ticket, TicketOffice, request_ids
from noria.gateway.tracing import trace_fields
from noria.gateway.uploads import Uploads


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whom a request belongs to. `weight` is its share of a busy queue against other tenants'. It shares cached
    prefixes with the tenants of its `cache_group`, if it has one. With `queue` its requests wait in that class,
    whatever they ask for. `caller` is who holds a stored key: for them limits are kept and usage is written down. In a
    call of the gateway's own `charged_to` names the account whose call it is."""

    id: str = "default"
    weight: float = 1.0
    cache_group: str = ""
    queue: str | None = None
    caller: Caller | None = None
    charged_to: str = ""

    @property
    def account(self) -> str:
        """How the ledger names it; empty: nothing is written down."""
        return "" if self.caller is None else self.caller.principal.account

    def account_for(self, card: ModelCard) -> str:
        """How the ledger names it for requests of this model: those of an adapter are charged under its name."""
        return f"{self.account}/{card.id}" if self.account and card.adapter is not None else self.account

    def may_use(self, card: ModelCard) -> bool:
        return self.caller is None or self.caller.principal.may_use(card.id, card.aliases)

    def check(self, card: ModelCard, service_class: str) -> None:
        """Raises `Forbidden` for a model or a service tier that its key may not use."""
        if self.caller is not None:
            self.caller.principal.check_model(card.id, card.aliases)
            self.caller.principal.check_tier(service_class)


@dataclass(frozen=True, slots=True)
class Question:
    """A request that passed every check: `fields.samples` choices for each prompt; `params` are per prompt,
    `prediction` is what the client believes that every answer will be."""

    model: ServedModel
    fields: SamplingFields
    prompts: Sequence[list[int]]
    params: Sequence[SamplingParams]
    options: TextOptions
    prediction: list[int] | None = None

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.fields.samples

    @property
    def has_grammar(self) -> bool:
        """Whether an engine may find fault with the request: grammars are compiled there."""
        return any(params.grammar is not None for params in self.params)


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of one gateway process."""

    live: LiveSettings
    broker: GatewayBroker
    records: RecordStore
    directory: ModelDirectory
    pump: FramePump
    metrics: GatewayMetrics
    tickets: TicketOffice
    lingering: Lingering
    drain: Drain
    files: Files
    uploads: Uploads
    batches: BatchRegister
    completions: StoredCompletions
    tenancy: Tenancy | None = None

    @property
    def settings(self) -> GatewaySettings:
        """As they are now: ask again for each request."""
        return self.live.now

    def generation(self, tenant: Tenant, question: Question, group: str, ticket: Ticket | None) -> Generation:
        """The answer's generation. Its requests are named after `group`. Nothing is sent before it is entered."""
        prompt_tokens = [len(prompt) for prompt in question.prompts]
        if ticket is not None and ticket.following:
            return self.following(question.model, question.options, prompt_tokens, question.num_choices, group, ticket)
        names = request_ids(group, question.num_choices)
        requests = self._requests(tenant, question, names, logged=ticket is not None)
        parts = [Part(r.id, 0 if r.copy else len(r.prompt), r.sampling.max_tokens) for r in requests]
        admission = self.admission(tenant, question.model.card, group, parts)
        origin = Queued(self.broker, self.pump, question.model.card, requests, ticket, admission)
        backlog = self.settings.max_stream_backlog
        return self._generation(origin, question.model, question.options, prompt_tokens, names, ticket, backlog)

    def following(
        self,
        model: ServedModel,
        options: TextOptions,
        prompt_tokens: Sequence[int],
        num_choices: int,
        group: str,
        ticket: Ticket,
    ) -> Generation:
        """The generation of an answer that another connection began."""
        names = request_ids(group, num_choices)
        origin = Followed(self.broker, self.pump, model.card, names, ticket)
        backlog = model.card.max_model_len * num_choices  # what is read again may come all at once
        return self._generation(origin, model, options, prompt_tokens, names, ticket, backlog)

    def _generation(
        self,
        origin: Origin,
        model: ServedModel,
        options: TextOptions,
        prompt_tokens: Sequence[int],
        names: Sequence[str],
        ticket: Ticket | None,
        max_backlog: int,
    ) -> Generation:
        return Generation(
            origin,
            self.lingering,
            self.metrics,
            model,
            names,
            prompt_tokens,
            options,
            ticket=ticket,
            timeout=self.settings.request_timeout,
            max_backlog=max_backlog,
        )

    def _requests(
        self, tenant: Tenant, question: Question, names: Sequence[str], *, logged: bool
    ) -> list[GenerationRequest]:
        fields, n, caller = question.fields, question.fields.samples, tenant.caller
        service_class = tenant.queue or fields.service_class
        tenant.check(question.model.card, service_class)
        deadline_ms = int((time.time() + self.settings.request_timeout) * 1000)
        traceparent, sent_ms = trace_fields()
        drawn = seeds(fields.seed, len(question.prompts), n)
        return [
            GenerationRequest(
                id=names[place],
                model=question.model.card.pool,
                prompt=question.prompts[place // n],
                sampling=msgspec.structs.replace(_bounded(caller, question, place // n), seed=seed),
                gateway=self.broker.boot_id,
                tenant=tenant.id,
                service_class=service_class,
                priority=fields.priority,
                deadline_ms=deadline_ms,
                cache_salt=fields.cache_salt or "",
                cache_group=tenant.cache_group,
                weight=tenant.weight,
                logged=logged,
                prediction=question.prediction,
                account=tenant.account_for(question.model.card),
                copy=place % n > 0,
                traceparent=traceparent,
                sent_ms=sent_ms,
                adapter=question.model.card.adapter,
            )
            for place, seed in enumerate(drawn)
        ]

    def admission(self, tenant: Tenant, card: ModelCard, group: str, parts: Sequence[Part]) -> Admission | None:
        """The way in for requests whose ids begin with `group`; None: no limits are kept for the tenant."""
        if self.tenancy is None or tenant.caller is None:
            return None
        return self.tenancy.admission(tenant.caller, card.id, card.pool, group, parts, in_batch=tenant.queue == "batch")

    def check_choices(self, num_prompts: int, n: int, param: str = "n") -> None:
        """Refuse a request for more choices than one client may occupy at once; `param` is what `n` is called."""
        limit = self.settings.max_choices
        if num_prompts * n > limit:
            param = param if n > 1 else "prompt"
            message = f"Invalid '{param}': {num_prompts * n} choices are more than the {limit} allowed in one request."
            raise InvalidRequest(message, param=param, code="integer_above_max_value")


def _bounded(caller: Caller | None, question: Question, place: int) -> SamplingParams:
    """A prompt's parameters with no more output tokens than its caller's limits could ever let in."""
    params = question.params[place]
    if caller is None:
        return params
    num_input, explicit = sum(map(len, question.prompts)), question.fields.wanted_tokens is not None
    most = output_limit(
        caller.principal,
        question.model.card.id,
        params.max_tokens,
        num_input,
        question.num_choices,
        is_explicit=explicit,
    )
    return msgspec.structs.replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))
