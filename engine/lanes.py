"""Which slot of the batch a request is shown in: the lowest free one, kept for as long as it stays.

For those who look; the scheduler knows no slots.
"""

from __future__ import annotations

from collections.abc import Collection
from heapq import heappop, heappush

from noria.engine.scheduling.request import Request


class Lanes:
    """Lanes are counted from 0."""

    def __init__(self) -> None:
        self._lane_by_request: dict[Request, int] = {}
        self._free: list[int] = []

    def of(self, request: Request) -> int:
        """The request's lane, given to it now if it has none."""
        lane = self._lane_by_request.get(request)
        if lane is None:
            lane = heappop(self._free) if self._free else len(self._lane_by_request)
            self._lane_by_request[request] = lane
        return lane

    def leave(self, request: Request) -> None:
        """Its lane is free again; a no-op for one that has none."""
        lane = self._lane_by_request.pop(request, None)
        if lane is not None:
            heappush(self._free, lane)

    def keep(self, requests: Collection[Request]) -> None:
        """All others leave."""
        for request in [request for request in self._lane_by_request if request not in requests]:
            self.leave(request)
