"""An unstreamed answer: the joined deltas of a generation, so that it equals its stream by construction.

Knows no shape of any endpoint.
"""

from __future__ import annotations

from noria.gateway.choice import Delta
from noria.gateway.generation import Generation


async def collect(generation: Generation) -> list[Delta]:
    """Run an entered generation to its end; one whole delta per choice, in the order of the choices."""
    whole = [Delta(index) for index in range(generation.num_choices)]
    texts: list[list[str]] = [[] for _ in whole]
    async for deltas in generation.deltas():
        for delta in deltas:
            texts[delta.index].append(delta.text)
            delta.text = ""
            whole[delta.index].extend(delta)
    for choice, parts in zip(whole, texts, strict=True):
        choice.text = "".join(parts)
    return whole
