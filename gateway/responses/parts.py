"""The items of a response's output, one at a time: how each grows, what it is when it is whole, and its events.

Pure. Knows no tokens and no response around the items.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import orjson

from noria.gateway.responses.events import EventWriter

Shown = dict[str, Any]
Entry = orjson.Fragment | Shown
"""Log-probabilities of one token: fresh from the model, or as they were kept."""


class Part(ABC):
    """One item that grows."""

    kind: str

    def __init__(self) -> None:
        self._id = ""
        self._place = 0
        self._grown: list[str] = []

    @property
    def _text(self) -> str:
        return "".join(self._grown)

    @property
    def _where(self) -> Shown:
        return {"item_id": self._id, "output_index": self._place}

    def begin(self, item_id: str, place: int, events: EventWriter | None) -> None:
        self._id, self._place = item_id, place
        if events is not None:
            events.event("response.output_item.added", output_index=place, item=self.bare())

    @abstractmethod
    def grow(self, text: str, logprobs: Sequence[Entry], events: EventWriter | None) -> None: ...

    def end(self, status: str, events: EventWriter | None) -> Shown:
        item = self.item(status)
        if events is not None:
            self._done(events)
            events.event("response.output_item.done", output_index=self._place, item=item)
        return item

    @abstractmethod
    def item(self, status: str) -> Shown: ...

    def bare(self) -> Shown:
        """The item as it begins."""
        return self.item("in_progress")

    @abstractmethod
    def _done(self, events: EventWriter) -> None: ...


class MessagePart(Part):
    kind = "message"

    def __init__(self) -> None:
        super().__init__()
        self._logprobs: list[Entry] = []
        self._rendered = b""

    def begin(self, item_id: str, place: int, events: EventWriter | None) -> None:
        super().begin(item_id, place, events)
        self._rendered = b'"item_id":"%s","output_index":%d,"content_index":0' % (item_id.encode(), place)
        if events is not None:
            events.event("response.content_part.added", **self._where, content_index=0, part=self._content())

    def grow(self, text: str, logprobs: Sequence[Entry], events: EventWriter | None) -> None:
        self._grown.append(text)
        self._logprobs += logprobs
        if events is not None:
            shown = orjson.dumps(logprobs) if logprobs else b"[]"
            events.delta(b"response.output_text.delta", self._rendered, text, shown)

    def item(self, status: str) -> Shown:
        return {
            "id": self._id, "type": "message", "status": status, "role": "assistant", "content": [self._content()]
        }  # fmt: skip

    def bare(self) -> Shown:
        return {**self.item("in_progress"), "content": []}

    def _content(self) -> Shown:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": self._logprobs}

    def _done(self, events: EventWriter) -> None:
        where, content = {**self._where, "content_index": 0}, self._content()
        events.event("response.output_text.done", **where, text=content["text"], logprobs=self._logprobs)
        events.event("response.content_part.done", **where, part=content)


class ReasoningPart(Part):
    """Thoughts are shown as they are; nothing sums them up."""

    kind = "reasoning"

    def begin(self, item_id: str, place: int, events: EventWriter | None) -> None:
        super().begin(item_id, place, events)
        if events is not None:
            events.event("response.content_part.added", **self._where, content_index=0, part=self._content())

    def grow(self, text: str, logprobs: Sequence[Entry], events: EventWriter | None) -> None:
        self._grown.append(text)
        if events is not None:
            events.event("response.reasoning_text.delta", **self._where, content_index=0, delta=text)

    def item(self, status: str) -> Shown:
        content = [self._content()]
        return {"id": self._id, "type": "reasoning", "summary": [], "content": content, "status": status}

    def bare(self) -> Shown:
        return {**self.item("in_progress"), "content": []}

    def _content(self) -> Shown:
        return {"type": "reasoning_text", "text": self._text}

    def _done(self, events: EventWriter) -> None:
        where, content = {**self._where, "content_index": 0}, self._content()
        events.event("response.reasoning_text.done", **where, text=content["text"])
        events.event("response.content_part.done", **where, part=content)


class CallPart(Part):
    kind = "function_call"

    def __init__(self, call_id: str, name: str) -> None:
        super().__init__()
        self._call_id = call_id
        self._name = name

    def grow(self, text: str, logprobs: Sequence[Entry], events: EventWriter | None) -> None:
        self._grown.append(text)
        if events is not None and text:
            events.event("response.function_call_arguments.delta", **self._where, delta=text)

    def item(self, status: str) -> Shown:
        return {
            "id": self._id, "type": "function_call", "status": status, "call_id": self._call_id, "name": self._name,
            "arguments": self._text,
        }  # fmt: skip

    def _done(self, events: EventWriter) -> None:
        events.event("response.function_call_arguments.done", **self._where, name=self._name, arguments=self._text)


def part_of(item: Shown) -> tuple[Part, str, list[Entry]]:
    """For a whole item: what it would have grown from, its text and its log-probabilities."""
    if item["type"] == "message":
        content = item["content"][0]
        return MessagePart(), content["text"], content["logprobs"]
    if item["type"] == "reasoning":
        return ReasoningPart(), item["content"][0]["text"], []
    return CallPart(item["call_id"], item["name"]), item["arguments"], []
