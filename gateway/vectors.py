"""The vectors of many prompts: each a pooled request on the queue, a bounded number of them at once.

All or nothing: the first that fails cancels the others. Knows no endpoint's shape.
"""

from __future__ import annotations

import asyncio
import functools
import math
import secrets
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

from noria.engine.wire.messages import GenerationRequest, SamplingParams, TokenFrame
from noria.gateway.choice import check_end
from noria.gateway.dependencies import cancel_and_wait
from noria.gateway.errors import SHUTTING_DOWN, DeadlineExpired, EngineFault, GatewayError, InvalidRequest, ShuttingDown
from noria.gateway.model_directory import ServedModel
from noria.gateway.origin import Queued
from noria.gateway.services import Services, Tenant
from noria.gateway.tenancy.admission import Part
from noria.gateway.tracing import trace_fields

T = TypeVar("T")

AT_ONCE = 64
"""Prompts of one HTTP request that are on the queue at once: enough to fill an engine's batch, and few enough that a
list of thousands does not fill the queue."""

Vector: TypeAlias = "array[float]"
"""C float32."""


def check_embeds(model: ServedModel) -> None:
    """Raises `InvalidRequest` for a model that gives no vectors."""
    if not model.card.embedding_size:
        raise InvalidRequest(f"The model '{model.card.id}' does not give embeddings.", param="model")


async def vectors(
    services: Services,
    tenant: Tenant,
    model: ServedModel,
    prompts: Sequence[list[int]],
    shape: Callable[[int, Vector], T],
    *,
    priority: int = 0,
) -> list[T]:
    """What `shape` makes of each prompt's place and vector (not normalised), called as they come; in the prompts'
    order. Raises a `GatewayError`."""
    services.directory.require_live(model)
    service_class = tenant.queue or "default"
    tenant.check(model.card, service_class)
    deadline = time.time() + services.settings.request_timeout
    group = f"embd-{secrets.token_hex(14)}"
    names = [f"{group}-{place}" for place in range(len(prompts))]
    parts = [Part(name, len(prompt), 0) for name, prompt in zip(names, prompts, strict=True)]
    admission, queued = services.admission(tenant, model.card, group, parts), set[str]()
    if admission is not None:
        await admission.admit()
    traceparent, sent_ms = trace_fields()
    shaped: dict[int, T] = {}
    places = iter(range(len(prompts)))

    async def work() -> None:
        for place in places:
            request = GenerationRequest(
                id=names[place],
                model=model.card.pool,
                prompt=prompts[place],
                sampling=SamplingParams(max_tokens=0),
                gateway=services.broker.boot_id,
                tenant=tenant.id,
                service_class=service_class,
                priority=priority,
                deadline_ms=int(deadline * 1000),
                weight=tenant.weight,
                pooling=model.card.pooling,
                account=tenant.account_for(model.card),
                traceparent=traceparent,
                sent_ms=sent_ms,
                adapter=model.card.adapter,
            )
            queued.add(request.id)
            shaped[place] = shape(place, await _one(services, model, request))

    workers = [asyncio.ensure_future(work()) for _ in range(min(AT_ONCE, len(prompts)))]
    try:
        async with asyncio.timeout(services.settings.request_timeout):
            await asyncio.gather(*workers)
    except TimeoutError:
        seconds = services.settings.request_timeout
        raise DeadlineExpired(f"The request was not done within {seconds:g} seconds.") from None
    finally:
        await cancel_and_wait(*workers)
        if admission is not None:
            admission.over()
            never = [name for name in names if name not in queued]
            services.pump.errand("withdrawal", functools.partial(admission.withdraw, never))
        done = sum(len(prompts[place]) for place in shaped)
        services.metrics.prompt_tokens.labels(model.card.id).inc(done)
    return [shaped[place] for place in range(len(prompts))]


def shortened(vector: Vector, dimensions: int | None, *, normalize: bool) -> Vector:
    """The first `dimensions` numbers (None: all), then of length 1 if `normalize`, as for models trained after
    "Matryoshka Representation Learning" (Kusupati et al., 2022)."""
    kept = vector if dimensions is None else vector[:dimensions]
    length = math.hypot(*kept) if normalize else 0.0
    return array("f", [value / length for value in kept]) if length else kept


async def _one(services: Services, model: ServedModel, request: GenerationRequest) -> Vector:
    origin = Queued(services.broker, services.pump, model.card, [request], None)
    waiting = _Waiting(origin, request.id)
    await origin.open(waiting, waiting.fail)
    try:
        return await waiting.vector
    finally:
        origin.leave()
        if not waiting.ended:
            origin.cancel({request.id: 0})


class _Waiting:
    """Takes the frames of one pooled request, of which the last counts. See `pump.FrameSink`."""

    def __init__(self, origin: Queued, request_id: str) -> None:
        self.vector: asyncio.Future[Vector] = asyncio.get_running_loop().create_future()
        self.ended = False  # as far as the engine is concerned
        self._origin = origin
        self._request_id = request_id
        self._heard = time.monotonic()

    def accept(self, frame: TokenFrame) -> None:
        self._heard = time.monotonic()
        if frame.finish is None or self.vector.done():
            return
        self.ended = True
        try:
            check_end(frame)
            if not frame.embedding:
                raise EngineFault("The engine gave no vector.")
            self.vector.set_result(_unpacked(frame.embedding))
        except GatewayError as error:
            self.fail(error)

    def flush(self) -> None:
        """Whoever waits for the future is woken by the loop."""

    def fail(self, error: GatewayError) -> None:
        if not self.vector.done():
            self.vector.set_exception(error)

    def cut_off(self) -> None:
        self.fail(ShuttingDown(SHUTTING_DOWN))

    async def resend_if_silent(self, seconds: float) -> None:
        if time.monotonic() - self._heard >= seconds:
            self._heard = time.monotonic()
            await self._origin.offer(self._request_id)


def packed(vector: Vector) -> bytes:
    """Little-endian float32."""
    if sys.byteorder == "big":
        vector = array("f", vector)
        vector.byteswap()
    return vector.tobytes()


def _unpacked(packed: bytes) -> Vector:
    vector = array("f")
    vector.frombytes(packed)
    if sys.byteorder == "big":
        vector.byteswap()
    return vector
