"""A request's body read within bounds of size and time, unpacked where it was sent compressed.

Knows no field of any body.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator

from starlette.requests import ClientDisconnect, Request

from noria.gateway.errors import BodyTimeout, BodyTooLarge, InvalidRequest, UnsupportedEncoding

_ENCODINGS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""zlib's window bits by content coding; RFC 9110 section 8.4.1: `deflate` is the zlib format."""

_SLOWEST = 16 * 1024
"""Bytes per second that a large body must come at, on the whole."""


class ClientGone(Exception):
    """The client hung up; there is nobody to answer."""


async def read_body(request: Request, limit: int, timeout: float) -> bytes:
    """The whole body. `limit` is in bytes and holds for what came over the wire and for what it unpacks to.

    Raises `BodyTooLarge`, `BodyTimeout`, `UnsupportedEncoding`, `InvalidRequest` and `ClientGone`.
    """
    claimed = request.headers.get("content-length", "")
    if claimed.isdigit() and int(claimed) > limit:
        raise BodyTooLarge(f"The request body has {claimed} bytes, more than the {limit} allowed.")
    body = bytearray()
    try:
        async with asyncio.timeout(timeout):
            async for part in _unpacked(request, limit):
                body += part
                if len(body) > limit:
                    raise BodyTooLarge(f"The request body has more than the {limit} bytes allowed.")
    except TimeoutError:
        raise BodyTimeout(f"The request body did not arrive within {timeout:g} seconds.") from None
    except ClientDisconnect:
        raise ClientGone from None
    return bytes(body)


async def arriving(request: Request, limit: int, patience: float) -> AsyncIterator[bytes]:
    """A large body as it arrives, which must not be compressed. It may take `patience` seconds, and beyond that as long
    as its bytes take at `_SLOWEST`. Raises `BodyTooLarge`, `BodyTimeout`, `UnsupportedEncoding` and `ClientGone`."""
    claimed = request.headers.get("content-length", "")
    if claimed.isdigit() and int(claimed) > limit:
        raise BodyTooLarge(f"The request body has {claimed} bytes, more than the {limit} allowed.")
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise UnsupportedEncoding("Unsupported content encoding: files are sent as they are.")
    began, size, parts = time.monotonic(), 0, aiter(request.stream())
    while True:
        try:
            async with asyncio.timeout(patience + size / _SLOWEST - (time.monotonic() - began)):
                part = await anext(parts)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise BodyTimeout("The request body arrives too slowly.") from None
        except ClientDisconnect:
            raise ClientGone from None
        size += len(part)
        if size > limit:
            raise BodyTooLarge(f"The request body has more than the {limit} bytes allowed.")
        yield part


def _unpacked(request: Request, limit: int) -> AsyncIterator[bytes]:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding in ("", "identity"):
        return request.stream()
    if encoding not in _ENCODINGS:
        shown = encoding[:32]
        raise UnsupportedEncoding(f"Unsupported content encoding: {shown!r}. Send gzip, deflate or none.")
    return _inflated(request.stream(), zlib.decompressobj(_ENCODINGS[encoding]), limit)


async def _inflated(parts: AsyncIterator[bytes], inflater: zlib._Decompress, limit: int) -> AsyncIterator[bytes]:
    try:
        async for part in parts:
            # One byte beyond the limit is enough to see that it is passed: a bomb unpacks no further.
            yield inflater.decompress(part, limit + 1)
            if inflater.unconsumed_tail:
                raise BodyTooLarge(f"The request body unpacks to more than the {limit} bytes allowed.")
    except zlib.error as error:
        raise InvalidRequest(f"We could not unpack the body of your request: {error}.", code="invalid_body") from None
    if not inflater.eof:
        raise InvalidRequest("The compressed body of your request ends too early.", code="invalid_body")
    if inflater.unused_data:
        raise InvalidRequest("The compressed body of your request is followed by other data.", code="invalid_body")
