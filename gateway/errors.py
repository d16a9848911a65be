"""What can go wrong with a request, and OpenAI's envelope of it.

    GatewayError
    ├── InvalidRequest 400            a parameter is missing, unknown, of the wrong type or out of range
    │   ├── UnsupportedParameter      documented elsewhere, not served here
    │   ├── ContextLengthExceeded     prompt and max_tokens do not fit the model
    │   └── StorageFull               the tenant keeps as much as it may
    ├── InvalidKey 401
    ├── Forbidden 403                 nobody may do that here, or this key may not
    ├── ModelNotFound 404
    ├── NotFound 404                  nothing of the tenant's has this id
    ├── UnknownAddress 404            there is no such endpoint
    ├── WrongMethod 405               the endpoint has no such method
    ├── StreamNotFound 404            nothing is kept of the stream that a client wants to go on with
    ├── UnreadBody                    the rest of the request's body is not read
    │   ├── BodyTimeout 408
    │   └── BodyTooLarge 413
    ├── DeadlineExpired 408           accepted, but not done within the request's life
    ├── WrongState 409                what is there cannot have that done to it now
    ├── IdempotencyConflict 409       the key belongs to another request, or to one whose answer is not to be had
    ├── UnsupportedEncoding 415       the body is compressed in a way that is not served
    ├── Overloaded 503                no live engine, the store is away, or the queue is full: try again later
    │   ├── RateLimited 429           this tenant has too much waiting
    │   └── ShuttingDown 503          this gateway is on its way out: another one serves
    ├── RequestCancelled 503          accepted, then cancelled by the server
    └── EngineFault 500               the request failed inside the engine

Knows no endpoint, no generation and no web framework; `http/error_answers.py` answers with them.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import orjson


class GatewayError(Exception):
    """Base of every error that a client may see. `param` names the offending field in dotted form."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    def headers(self) -> dict[str, str]:
        return {}


class InvalidRequest(GatewayError):
    status = 400
    type = "invalid_request_error"


class UnsupportedParameter(InvalidRequest):
    code = "unsupported_parameter"


class StorageFull(InvalidRequest):
    code = "storage_limit_exceeded"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class InvalidKey(GatewayError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"

    def headers(self) -> dict[str, str]:
        return {"www-authenticate": "Bearer"}


class Forbidden(GatewayError):
    status = 403
    type = "invalid_request_error"
    code = "forbidden"


class ModelNotFound(GatewayError):
    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class NotFound(GatewayError):
    status = 404
    type = "invalid_request_error"


class UnknownAddress(GatewayError):
    status = 404
    type = "invalid_request_error"
    code = "unknown_url"


class WrongMethod(GatewayError):
    """`allowed` are the methods that there are, as in an Allow header."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_supported"

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self._allowed = allowed

    def headers(self) -> dict[str, str]:
        return {"allow": self._allowed} if self._allowed else {}


class StreamNotFound(GatewayError):
    """The same whether a stream never was, is no longer kept, or is another tenant's."""

    status = 404
    type = "invalid_request_error"
    code = "stream_not_found"


class WrongState(GatewayError):
    status = 409
    type = "invalid_request_error"

    def headers(self) -> dict[str, str]:
        return {"x-should-retry": "false"}  # clients retry every 409 by themselves


class IdempotencyConflict(GatewayError):
    """Codes: `idempotency_key_reused` (another body or endpoint), `idempotency_key_in_use` (the first request with the
    key is just being let in) and `idempotency_result_expired`. The type is Stripe's. Only the second is worth a retry,
    and clients that retry every 409 by themselves are told so."""

    status = 409
    type = "idempotency_error"
    code = "idempotency_key_reused"

    def headers(self) -> dict[str, str]:
        if self.code == "idempotency_key_in_use":
            return {"retry-after": "1", "retry-after-ms": "1000"}
        return {"x-should-retry": "false"}


class UnreadBody(GatewayError):
    """The rest of the body is not worth reading: the connection ends with the answer."""

    type = "invalid_request_error"

    def headers(self) -> dict[str, str]:
        return {"connection": "close"}


class BodyTimeout(UnreadBody):
    status = 408
    code = "request_timeout"

    def headers(self) -> dict[str, str]:
        return {"connection": "close"}  # else the rest could trickle in for ever


class BodyTooLarge(UnreadBody):
    status = 413
    code = "request_too_large"


class UnsupportedEncoding(GatewayError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_content_encoding"

    def headers(self) -> dict[str, str]:
        return {"accept-encoding": "gzip, deflate"}


class Overloaded(GatewayError):
    """`retry_after` is in seconds; it goes out as Retry-After, rounded up, and to the millisecond in retry-after-ms."""

    status = 503
    code = "server_is_overloaded"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    def headers(self) -> dict[str, str]:
        seconds = max(self.retry_after, 0.001)
        return {"retry-after": str(max(1, math.ceil(seconds))), "retry-after-ms": str(math.ceil(seconds * 1000))}


class RateLimited(Overloaded):
    status = 429
    type = "requests"
    code = "rate_limit_exceeded"


class ShuttingDown(Overloaded):
    code = "server_shutting_down"

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "connection": "close"}


class DeadlineExpired(GatewayError):
    status = 408
    code = "request_timeout"


class RequestCancelled(GatewayError):
    status = 503
    code = "request_cancelled"


class EngineFault(GatewayError):
    status = 500
    code = "engine_error"


UNEXPECTED = EngineFault("The server had an error while processing your request.", code="internal_error")
"""What a client sees of an exception that nobody foresaw; the log has the rest."""

SHUTTING_DOWN = "This server is shutting down. Please try again."
STORE_AWAY = "The server cannot reach its store at the moment. Please try again."


def envelope(error: GatewayError) -> bytes:
    """The JSON body `{"error": {message, type, param, code}}` of an error."""
    fields: dict[str, Any] = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return orjson.dumps({"error": fields})
