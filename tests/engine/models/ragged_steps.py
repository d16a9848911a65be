"""Whole decoders fed by hand: a model of a checkpoint, its pools, and one ragged step whose logits are compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from noria.engine.models.build import Checkpoint, build_weights
from noria.engine.models.decoder import Decoder
from noria.kernels.choice import Sizes, choose
from noria.kernels.layout import RaggedLayout
from noria.kernels.pools import KVPools

BLOCK_SIZE, BLOCKS_PER_ROW = 16, 40


def decoder(checkpoint: Checkpoint, kernels: str, length: int = 0) -> Decoder:
    """On one thread, to serve `length` tokens (0: what it can)."""
    spec = checkpoint.spec()
    spec = spec.for_length(length or spec.max_len)
    ops = choose(kernels, Sizes(spec.hidden_size, spec.head_dim, spec.ffn_size, BLOCK_SIZE), threads=1)
    return Decoder(spec, build_weights(spec, checkpoint, ops), ops)


def pools(model: Decoder, num_rows: int) -> KVPools:
    spec, blocks = model.spec, num_rows * BLOCKS_PER_ROW
    return model.ops.new_kv_pools(spec.num_layers, blocks, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim, torch.float32)


def step(model: Decoder, kv: KVPools, rows: list[tuple[int, int, list[int]]], decode_rows: int) -> Tensor:
    """Logits of every token of rows (place of the row, tokens computed before, its new tokens)."""
    # Blocks of the rows are interleaved, so that no row's memory is contiguous.
    num_rows = len(kv.keys[0]) // BLOCKS_PER_ROW  # a page is a block here
    placed = [
        (computed, len(ids), [block * num_rows + place for block in range(-(-(computed + len(ids)) // BLOCK_SIZE))])
        for place, computed, ids in rows
    ]
    token_ids = torch.tensor([token for _, _, ids in rows for token in ids])
    positions = torch.cat([torch.arange(computed, computed + len(ids)) for _, computed, ids in rows])
    layout = RaggedLayout.build(placed, decode_rows, BLOCK_SIZE)
    return model.forward(token_ids, positions, kv, layout, torch.arange(len(token_ids)))


def expected_logits(reference: Any, ids: list[int]) -> Tensor:
    """What the module of transformers gives for each of the tokens."""
    with torch.inference_mode():
        logits: Tensor = reference(torch.tensor([ids])).logits[0]
    return logits
