"""GGUF files broken on purpose, read whole: each is a model or one clear line, soon, and never a crash.

    python -m bench.fuzz_gguf                         # 20,000 files; --inputs, --seed

A small real model is changed in one to four places: types, counts and lengths in its header become values at the edges
of what fits there, bytes become others, pieces are cut out, doubled or exchanged. Each file is then read as an engine
would: header, shape, weights, tokenizer, chat template. Exits with 1 where anything else was
raised than ModelError, or took longer than `broken_models.PATIENCE`; such files are kept.
"""

from __future__ import annotations

import random
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

from bench import broken_models
from bench.broken_models import fault_of
from noria.engine.models.build import build_weights
from noria.engine.models.gguf_checkpoint import GGUFCheckpoint
from noria.engine.models.gguf_file import GGUFFile
from noria.engine.models.gguf_tokenizer import gguf_tokenizer_files
from noria.engine.wire.messages import TokenizerFiles
from noria.kernels.torch_ops import TorchOps

EDGES = (0, 1, 2, 7, 8, 9, 31, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
HIDDEN, FFN = 32, 64


def write_small(path: Path) -> None:
    """A one-layer llama with a byte-level vocabulary, its tensors in several kinds."""
    symbols = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
    tokens = [*symbols, "<s>", "</s>", "Ġa", "in"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(symbols) + [3, 3, 1, 1])
    writer.add_token_merges(["Ġ a", "i n"])
    writer.add_bos_token_id(len(symbols))
    writer.add_eos_token_id(len(symbols) + 1)
    writer.add_chat_template("{{ messages[0].content }}")
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,), "blk.0.attn_norm": (HIDDEN,)}
    shapes |= {"blk.0.ffn_norm": (HIDDEN,), "blk.0.ffn_down": (HIDDEN, FFN)}
    shapes |= {f"blk.0.ffn_{part}": (FFN, HIDDEN) for part in ("gate", "up")}
    shapes |= {f"blk.0.attn_{part}": (HIDDEN, HIDDEN) for part in ("q", "output")}
    shapes |= {f"blk.0.attn_{part}": (HIDDEN // 2, HIDDEN) for part in ("k", "v")}
    chance = np.random.default_rng(0)
    for place, (name, shape) in enumerate(shapes.items()):
        kind = gguf.GGMLQuantizationType.Q8_0 if len(shape) == 2 and place % 2 else gguf.GGMLQuantizationType.F32
        values = chance.standard_normal(shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Breaker:
    """Makes broken files of a whole one."""

    def __init__(self, whole: bytes, names: list[str], seed: int) -> None:
        self._whole = whole
        self._chance = random.Random(seed)
        # Behind each name stand a type and a value, or a type, a count and values.
        self._telling = [whole.find(name.encode()) + len(name.encode()) for name in names]
        self._header = max(self._telling) + 64

    def broken(self) -> bytes:
        data = bytearray(self._whole)
        for _ in range(self._chance.randint(1, 4)):
            self._chance.choice((self._edge, self._edge, self._edge, self._bytes, self._piece))(data)
        return bytes(data)

    def _place(self, data: bytearray) -> int:
        near = self._chance.choice(self._telling) + self._chance.choice((-8, 0, 4, 8, 12, 16))
        anywhere = self._chance.randrange(self._header)
        at_top = self._chance.choice((4, 8, 16))  # version and counts
        (place,) = self._chance.choices((near, anywhere, at_top), weights=(12, 4, 1))
        return min(place, max(0, len(data) - 8))

    def _edge(self, data: bytearray) -> None:
        place, value = self._place(data), self._chance.choice((*EDGES, self._chance.randrange(16)))
        if self._chance.random() < 0.5:
            struct.pack_into("<I", data, place, value & 0xFFFFFFFF)
        elif len(data) >= place + 8:
            struct.pack_into("<Q", data, place, value)

    def _bytes(self, data: bytearray) -> None:
        for place in range(start := self._place(data), min(len(data), start + self._chance.randint(1, 8))):
            data[place] = self._chance.randrange(256)

    def _piece(self, data: bytearray) -> None:
        start, size = self._place(data), self._chance.choice((1, 4, 8, 64, 1000))
        piece = bytes(data[start : start + size])
        data[start : start + self._chance.choice((0, size, size))] = self._chance.choice((b"", piece * 2, piece[::-1]))
        if len(data) < 64:
            data += bytes(64 - len(data))


def read_whole(path: Path) -> TokenizerFiles:
    """As an engine reads it; returns what it would publish for gateways. Raises ModelError."""
    checkpoint = GGUFCheckpoint(path)
    files = gguf_tokenizer_files(checkpoint.file)
    build_weights(checkpoint.spec(), checkpoint, TorchOps())
    return files


def faults(folder: Path, inputs: int, seed: int, outcomes: Counter[str]) -> Iterator[str]:
    """What should not have happened, a line for each. The files are kept in `folder`."""
    write_small(folder / "whole.gguf")
    whole = GGUFFile(folder / "whole.gguf")
    breaker = Breaker((folder / "whole.gguf").read_bytes(), [*whole.metadata, *whole.tensors], seed)
    for number in range(inputs):
        path = folder / f"broken{number}.gguf"
        path.write_bytes(breaker.broken())
        if fault := fault_of(path, read_whole, outcomes):
            yield fault
        else:
            path.unlink()
    (folder / "whole.gguf").unlink()


def main(arguments: list[str] | None = None) -> int:
    return broken_models.main(__doc__, 20_000, faults, arguments)


if __name__ == "__main__":
    sys.exit(main())
