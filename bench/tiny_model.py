"""Makes a tiny Llama of random weights whose every token is one printable character: engines of it start in seconds,
and a lost or doubled token shows in the text. Knows no server.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM = 64, 128, 4, 2, 16
END = "</s>"
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


def make(folder: Path, *, num_layers: int = 2, max_len: int = 2048, seed: int = 0) -> Path:
    """Write the model into `folder` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    characters = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]  # space and newline as byte-level BPE spells them
    vocab = {symbol: place for place, symbol in enumerate([END, *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", eos_token=END, chat_template=TEMPLATE)
    _write(
        folder / "config.json",
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        vocab_size=len(vocab),
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=num_layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        hidden_act="silu",
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=max_len,
        tie_word_embeddings=False,
        eos_token_id=0,
        torch_dtype="float32",
    )
    save_file(_weights(len(vocab), num_layers, seed), str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def _write(path: Path, **content: object) -> None:
    path.write_text(json.dumps(content))


def _weights(vocab_size: int, num_layers: int, seed: int) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=noise) * scale

    weights = {
        "model.embed_tokens.weight": matrix(vocab_size, HIDDEN, 1.0),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": matrix(vocab_size, HIDDEN, 0.4),
    }
    for layer in range(num_layers):
        at = f"model.layers.{layer}."
        weights |= {
            at + "input_layernorm.weight": torch.ones(HIDDEN),
            at + "post_attention_layernorm.weight": torch.ones(HIDDEN),
            at + "self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN, 0.3),
            at + "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, 0.3),
            at + "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, 0.3),
            at + "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM, 0.3),
            at + "mlp.gate_proj.weight": matrix(FFN, HIDDEN, 0.2),
            at + "mlp.up_proj.weight": matrix(FFN, HIDDEN, 0.2),
            at + "mlp.down_proj.weight": matrix(HIDDEN, FFN, 0.2),
        }
    return weights
