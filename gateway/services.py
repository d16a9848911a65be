"""What the endpoints work with, made once per app and held together; and the start of a generation from it.

Knows no HTTP.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from noria.engine.wire.broker import GatewayBroker
from noria.engine.wire.messages import GenerationRequest, SamplingParams
from noria.gateway.choice import TextOptions
from noria.gateway.config import GatewaySettings
from noria.gateway.errors import InvalidRequest
from noria.gateway.generation import Generation
from noria.gateway.metrics import GatewayMetrics
from noria.gateway.model_directory import ModelDirectory, ServedModel
from noria.gateway.pump import FramePump
from noria.gateway.sampling import seeds
from noria.gateway.schemas.sampling import SamplingFields


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whom a request belongs to. All keys are one tenant until organisations exist."""

    id: str = "default"


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of one gateway process."""

    settings: GatewaySettings
    broker: GatewayBroker
    directory: ModelDirectory
    pump: FramePump
    metrics: GatewayMetrics

    def generation(
        self,
        tenant: Tenant,
        model: ServedModel,
        fields: SamplingFields,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        options: TextOptions,
    ) -> Generation:
        """`fields.n` choices for each prompt; `params` are per prompt. Nothing is sent before it is entered."""
        group = secrets.token_hex(12)
        deadline_ms = int((time.time() + self.settings.request_timeout) * 1000)
        drawn = seeds(fields.seed, len(prompts), fields.n)
        requests = [
            GenerationRequest(
                id=f"{group}-{place}",
                model=model.card.id,
                prompt=prompts[place // fields.n],
                sampling=msgspec.structs.replace(params[place // fields.n], seed=seed),
                gateway=self.broker.boot_id,
                tenant=tenant.id,
                service_class=fields.service_class,
                priority=fields.priority,
                deadline_ms=deadline_ms,
                cache_salt=tenant.id,
            )
            for place, seed in enumerate(drawn)
        ]
        return Generation(
            self.broker,
            self.pump,
            self.metrics,
            model,
            requests,
            options,
            n=fields.n,
            timeout=self.settings.request_timeout,
            max_backlog=self.settings.max_stream_backlog,
        )

    def check_choices(self, num_prompts: int, n: int) -> None:
        """Refuse a request for more choices than one client may occupy at once."""
        limit = self.settings.max_choices
        if num_prompts * n > limit:
            param = "n" if n > 1 else "prompt"
            message = f"Invalid '{param}': {num_prompts * n} choices are more than the {limit} allowed in one request."
            raise InvalidRequest(message, param=param, code="integer_above_max_value")
