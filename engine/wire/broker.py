"""The broker between gateways and engines, on Redis: its two faces and its errors, under one name.

Knows nothing itself: keys.py holds the names, lua/ the scripts, gateway_broker.py and engine_broker.py the two faces.
"""

from noria.engine.wire.connection import BrokerUnavailable, StoreFault, redact
from noria.engine.wire.engine_broker import EngineBroker, Exchange
from noria.engine.wire.gateway_broker import GatewayBroker, ModelStatus, QueueFull, QueuePosition, TenantQueueFull

__all__ = [
    "BrokerUnavailable",
    "EngineBroker",
    "Exchange",
    "GatewayBroker",
    "ModelStatus",
    "QueueFull",
    "QueuePosition",
    "StoreFault",
    "TenantQueueFull",
    "redact",
]
