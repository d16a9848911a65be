"""Reads a multipart form with one file in it while it arrives: the file's bytes go on in pieces, fields are kept.

Memory holds one piece however large the file is. Knows no field's meaning, no HTTP and no store.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass, field

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from noria.gateway.errors import InvalidRequest

MAX_FIELDS = 16
MAX_FIELD_BYTES = 8192
FORM_BYTES = 2 * MAX_FIELDS * MAX_FIELD_BYTES
"""Beside the file itself: fields, their headers, boundaries."""

MAX_NAME = 1024
"""Characters of a file's name at most."""

PIECE = 256 * 1024
"""Bytes of a piece, but for the last one."""


@dataclass(slots=True)
class _Part:
    headers: dict[str, bytes] = field(default_factory=dict)
    name: str = ""
    data: bytearray = field(default_factory=bytearray)
    is_file: bool = False


class Form:
    """One form. First iterate `file()` to its end, then `fields` has the rest, wherever it stood, and `filename` is set
    if there was a file. Raises `InvalidRequest`."""

    def __init__(self, content_type: str | None, file_field: str = "file") -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 0 < len(boundary) <= 256:
            message = "The body must be multipart/form-data with a boundary: a file and the fields that describe it."
            raise InvalidRequest(message, code="invalid_content_type")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._file_field = file_field
        self._part = _Part()
        self._header = b""
        self._pending = bytearray()  # of the file
        self._ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_begin": self._begin_header,
                "on_header_field": self._header_name,
                "on_header_value": self._header_value,
                "on_headers_finished": self._headers_done,
                "on_part_data": self._data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    async def file(self, body: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        """The file's bytes in pieces of `PIECE`."""
        async for received in body:
            for start in range(0, len(received), PIECE):
                try:
                    self._parser.write(received[start : start + PIECE])
                except MultipartParseError as error:
                    raise InvalidRequest(f"The form could not be read: {error}.", code="invalid_form") from None
                while len(self._pending) >= PIECE:
                    yield bytes(self._pending[:PIECE])
                    del self._pending[:PIECE]
        if not self._ended:
            raise InvalidRequest("The form ends before its last boundary.", code="invalid_form")
        if self._pending:
            yield bytes(self._pending)
            self._pending.clear()

    def _begin(self) -> None:
        self._part = _Part()

    def _begin_header(self) -> None:
        self._header = b""

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        name = self._header.decode("latin-1").lower()
        self._part.headers[name] = self._part.headers.get(name, b"") + data[start:end]

    def _headers_done(self) -> None:
        _, options = parse_options_header(self._part.headers.get("content-disposition"))
        self._part.name = options.get(b"name", b"").decode("utf-8", "replace")[:256]
        self._part.is_file = self._part.name == self._file_field
        if self._part.is_file:
            if self.filename is not None:
                raise InvalidRequest(f"More than one '{self._file_field}' was sent.", param=self._file_field)
            self.filename = options.get(b"filename", b"").decode("utf-8", "replace")[-MAX_NAME:] or "upload"
        elif len(self.fields) >= MAX_FIELDS:
            raise InvalidRequest(f"The form has more than {MAX_FIELDS} fields.", code="invalid_form")

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._part.is_file:
            self._pending += data[start:end]
            return
        self._part.data += data[start:end]
        if len(self._part.data) > MAX_FIELD_BYTES:
            message = f"Invalid '{self._part.name}': more than {MAX_FIELD_BYTES} bytes."
            raise InvalidRequest(message, param=self._part.name, code="string_above_max_length")

    def _end_part(self) -> None:
        if not self._part.is_file:
            self.fields[self._part.name] = self._part.data.decode("utf-8", "replace")

    def _end(self) -> None:
        self._ended = True
