"""A mixture of experts: each token's feed-forward network is a weighted sum of a few of many.

Composed of the operations, so that a backend need not know of it. Knows no model, no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from noria.kernels.ops import Ops, Packed


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of one layer. `networks` are gate beside up, and down, of each."""

    router: Packed  # [E, hidden]
    networks: Sequence[tuple[Packed, Packed]]
    per_token: int
    is_normalised: bool  # weights of the chosen ones sum to 1


def mix(ops: Ops, x: Tensor, experts: Experts, activate: Callable[[Tensor], Tensor]) -> Tensor:
    """x [T, hidden] -> [T, hidden]. A token's experts are added in the order of their numbers."""
    likes = torch.softmax(ops.linear(x, experts.router).float(), dim=-1)
    weights, chosen = torch.topk(likes, experts.per_token, dim=-1)  # [T, per_token]
    if experts.is_normalised:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    out = torch.zeros_like(x)
    for number in sorted(set(chosen.flatten().tolist())):
        tokens, place = (chosen == number).nonzero(as_tuple=True)
        gate_up, down = experts.networks[number]
        y = ops.linear(activate(ops.linear(x[tokens], gate_up)), down)
        out[tokens] += y.mul_(weights[tokens, place, None].to(y.dtype))
    return out
