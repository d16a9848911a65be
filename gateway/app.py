"""`create_app`: puts the parts of a gateway together into one ASGI application.

Knows no business rule: what a request means is in the endpoints, what happens to it in `generation`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from noria.engine.wire.backpressure import QueueLimits
from noria.engine.wire.batch_store import BatchStore
from noria.engine.wire.broker import GatewayBroker
from noria.engine.wire.record_store import RecordStore
from noria.engine.wire.tracing import open_tracer
from noria.engine.wire.watches import Watches
from noria.gateway.adapters import AdapterOffice
from noria.gateway.batches.attempts import Ask
from noria.gateway.batches.dispatch import BatchDispatch
from noria.gateway.batches.register import BatchRegister
from noria.gateway.batches.run import Tools
from noria.gateway.config import GatewaySettings
from noria.gateway.dependencies import KeyRing
from noria.gateway.drain import Drain
from noria.gateway.endpoints import (
    adapters,
    batches,
    chat,
    completions,
    conversations,
    embeddings,
    files,
    health,
    messages,
    metrics,
    models,
    openapi,
    operations,
    organizations,
    pages,
    projects,
    rate_limits,
    responses,
    scoring,
    service_accounts,
    stored_completions,
    tokenization,
    uploads,
    usage,
)
from noria.gateway.files import Files
from noria.gateway.http import error_answers
from noria.gateway.http.doors import Doors
from noria.gateway.http.methods import Methods
from noria.gateway.http.request_context import RequestContext
from noria.gateway.inner_call import InnerCall, Reply
from noria.gateway.linger import Lingering
from noria.gateway.metrics import GatewayMetrics
from noria.gateway.model_directory import ModelDirectory
from noria.gateway.pump import FramePump
from noria.gateway.records import record_limits
from noria.gateway.reload import LiveSettings
from noria.gateway.responses.background import HOLD, Background
from noria.gateway.responses.context import Shelves
from noria.gateway.responses.conversations import ConversationShelf
from noria.gateway.responses.stored import ResponseShelf
from noria.gateway.services import Services
from noria.gateway.stored_completions import StoredCompletions
from noria.gateway.tenancy.tenancy import Tenancy, TenancyOptions
from noria.gateway.tickets import TicketOffice
from noria.gateway.upkeep import Upkeep
from noria.gateway.uploads import Uploads
from noria.gateway.wheel import WheelFeed

_NOUNS = (
    chat,
    stored_completions,
    completions,
    responses,
    messages,
    conversations,
    embeddings,
    models,
    openapi,
    scoring,
    tokenization,
    files,
    uploads,
    batches,
    operations,
    adapters,
    organizations,
    projects,
    rate_limits,
    service_accounts,
    usage,
)  # fmt: skip


def create_app(settings: GatewaySettings) -> FastAPI:
    """A gateway that connects to its store when it starts, and keeps trying for as long as the store is away."""
    live = LiveSettings(settings)
    broker = GatewayBroker(settings.redis_url)
    live.watch(lambda now: broker.limit(QueueLimits(now.max_queued, tenant_depth=now.max_queued_per_tenant)))
    tracer = open_tracer("gateway", settings.traces, broker.boot_id)
    directory = ModelDirectory(broker)
    live.watch(lambda now: directory.rename(now.model_by_alias))
    counted = GatewayMetrics(directory.models_now, vllm_names=settings.vllm_metrics)
    pump = FramePump(broker)
    records = RecordStore(settings.redis_url, record_limits(settings))
    batch_store = BatchStore(settings.redis_url)
    stored_files = Files(records, settings.max_file_bytes)
    services = Services(
        live,
        broker,
        records,
        directory,
        pump,
        counted,
        TicketOffice(broker, settings.request_timeout),
        Lingering(pump, settings.resume_window),
        Drain(),
        stored_files,
        Uploads(records, stored_files, settings.max_file_bytes),
        BatchRegister(records, batch_store),
        StoredCompletions(records, settings.response_ttl),
        _tenancy(settings, counted),
    )
    shelves = Shelves(
        ResponseShelf(services.records, settings.response_ttl),
        ConversationShelf(services.records, settings.conversation_ttl),
        services.files,
    )
    background = Background(services, shelves, Watches(settings.redis_url, "responses", hold=HOLD))

    async def ask(call: InnerCall) -> Reply:
        return await call.run(app)

    dispatch = BatchDispatch(_batch_tools(services, batch_store, ask), services.drain, broker.boot_id)
    upkeep = Upkeep(services, background, dispatch)
    wheel = WheelFeed(settings.redis_url)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        upkeep.start()
        yield
        await upkeep.stop()
        await batch_store.close()
        await wheel.close()
        if services.tenancy is not None:
            await services.tenancy.close()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)

    app = FastAPI(title="Noria", lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False
    app.state.services = services
    app.state.shelves = shelves
    app.state.background = background
    app.state.wheel = wheel
    app.state.adapters = AdapterOffice(broker, directory)
    live.watch(lambda now: setattr(app.state, "keys", KeyRing(now.key_entries)))
    error_answers.install(app)
    app.include_router(health.router)
    app.include_router(metrics.router)
    app.include_router(pages.router)
    for prefix in ("/v1", ""):
        for noun in _NOUNS:
            app.include_router(noun.router, prefix=prefix)
    app.add_middleware(Methods, routes=app.routes)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[
                "x-request-id",
                "openai-organization",
                "openai-processing-ms",
                "openai-version",
                "retry-after",
                "retry-after-ms",
                "x-noria-granted-tokens",
                "x-noria-queue-position",
                *(
                    f"x-ratelimit-{what}-{of}"
                    for what in ("limit", "remaining", "reset")
                    for of in ("requests", "tokens", "project-tokens")
                ),
                "x-noria-queue-eta",
            ],
        )
    if settings.metrics_port:
        app.add_middleware(Doors, metrics_port=settings.metrics_port)
    # Added last: outermost.
    app.add_middleware(RequestContext, metrics=counted, drain=services.drain, tracer=tracer)
    return app


def _tenancy(settings: GatewaySettings, counted: GatewayMetrics) -> Tenancy | None:
    if settings.pepper is None:
        return None
    options = TenancyOptions(settings.limits_fail == "open", settings.ledger_days, settings.usage_days)
    return Tenancy(
        settings.redis_url, settings.pepper, options, lambda outcome: counted.limits_unavailable.labels(outcome).inc()
    )


def _batch_tools(services: Services, store: BatchStore, ask: Ask) -> Tools:
    settings = services.settings
    return Tools(
        register=services.batches,
        store=store,
        files=services.files,
        directory=services.directory,
        metrics=services.metrics,
        ask=ask,
        forget=services.tickets.forget,
        slots=asyncio.Semaphore(settings.batch_concurrency),
        concurrency=settings.batch_concurrency,
        max_line_bytes=lambda: services.settings.max_body_bytes,
    )
