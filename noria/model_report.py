"""What `noria models` says of a model from its headers alone: shape, memory, and how it is computed.

Reads no weights and serves nothing.
"""

from __future__ import annotations

from pathlib import Path

from rich.filesize import decimal
from rich.table import Table

from noria.engine.config import EngineConfig
from noria.engine.memory import available, parse_size, show_size
from noria.engine.models.errors import ModelError
from noria.engine.models.layer_groups import group_layers
from noria.engine.models.load import inspect, is_foreign, stored_bytes
from noria.engine.models.lora import describe
from noria.engine.models.lora_config import CONFIG_FILE
from noria.engine.models.precision import Precision
from noria.engine.models.source import ModelSource, list_models, resolve
from noria.engine.models.spec import ModelSpec
from noria.engine.plan import kv_groups
from noria.kernels.pools import kv_bytes_per_block
from noria.tables import columns

HOW = {
    "fused": "fused: all layers in one call",
    "composed": "composed: our layers, an operation at a time",
    "foreign": "transformers: its own module with our attention, slower",
}
TYPICAL = 2048  # tokens of a request, beside the model's whole context


def model_table() -> Table:
    """The models that lie on this machine."""
    table = columns("MODEL", "SIZE", "KIND", "COMPUTED", numbers={"SIZE"})
    table.add_column("WHERE", overflow="fold")
    for source in list_models():
        table.add_row(source.name, decimal(source.size_bytes), source.kind, _how(source), str(source.path))
    return table


def _how(source: ModelSource) -> str:
    try:
        return "transformers, slower" if is_foreign(source) else inspect(source).computed
    except ModelError:
        return "not supported"


def inspect_table(model: str, memory: str) -> Table:
    """One model, and how many requests fit into `memory` (a size; empty: what is free here). Raises ModelError where it
    is not supported, ValueError for a size that is none."""
    room = parse_size(memory) if memory else available()
    folder = Path(model).expanduser()
    if (folder / CONFIG_FILE).is_file() and not (folder / "config.json").exists():
        return _rows(_adapter(folder))
    source = resolve(model)
    spec, stored = inspect(source), stored_bytes(source)
    rounded = source.kind == "safetensors" and not spec.foreign_parameters
    return _rows([*_shape(source, spec), *_memory(spec, stored, rounded), *_batches(spec, stored, room)])


def _rows(rows: list[tuple[str, str]]) -> Table:
    table = columns("", "")
    table.show_header, table.columns[1].no_wrap = False, False
    for row in rows:
        table.add_row(*row)
    return table


def _adapter(folder: Path) -> list[tuple[str, str]]:
    """Without its model nobody can say whether it fits; that is looked at when it is loaded."""
    config, matrices, parameters = describe(folder)
    targets = config.target_modules
    parts = sorted({name.rpartition(".")[2] for name in targets}) if isinstance(targets, list) else []
    ranks = ", ".join(f"{rank} for {pattern}" for pattern, rank in config.rank_pattern.items())
    return [
        ("adapter", f"LoRA, {folder}"),
        ("trained on", config.base_model_name_or_path or "(not said)"),
        ("rank", f"{config.r}{', ' + ranks if ranks else ''}"),
        ("alpha", f"{config.lora_alpha:g}{' by the root of the rank' if config.use_rslora else ''}"),
        ("linears", ", ".join(parts) or str(targets or "as in its file")),
        ("parameters", f"{parameters:,} in {matrices} matrices"),
        ("serve it", f"noria serve MODEL --lora NAME={folder}"),
    ]


def _shape(source: ModelSource, spec: ModelSpec) -> list[tuple[str, str]]:
    windows = sorted({layer.window for layer in spec.layers if layer.window})
    sliding = sum(bool(layer.window) for layer in spec.layers)
    heads = f"{spec.num_heads} heads over {spec.num_kv_heads} of keys and values, {spec.head_dim} wide"
    rows = [
        ("model", f"{source.name} ({source.kind}, {source.path})"),
        ("architecture", spec.architecture),
        ("computed", HOW[spec.computed]),
        ("parameters", f"{spec.num_parameters:,}"),
        ("layers", f"{spec.num_layers}, {heads}"),
        ("context", f"{spec.max_len:,} tokens"),
    ]
    if windows:
        rows.append(("windows", f"{sliding} layers see the last {', '.join(map(str, windows))} tokens"))
    if spec.experts:
        rows.append(("experts", f"{spec.experts.per_token} of {spec.experts.num} for a token"))
    return rows


def _memory(spec: ModelSpec, stored: int, rounded: bool) -> list[tuple[str, str]]:
    """`rounded`: whether --dtype and --quantize change anything, as they do not where the file holds integers."""
    numbers = kv_bytes_per_block(spec.num_layers, 1, spec.num_kv_heads, spec.head_dim) // 4  # of a token
    rows = [("weights", f"{show_size(stored)} as stored")]
    if rounded:
        kinds = {"bf16 or fp16": Precision("bf16"), "int8": Precision(quantize="int8"), "q4": Precision(quantize="q4")}
        sizes = [f"{show_size(spec.weight_bytes)} fp32"]
        sizes += [f"{show_size(how.weight_bytes(spec, stored))} {name}" for name, how in kinds.items()]
        rows.append(("in memory", ", ".join(sizes)))
    kept = ", ".join(f"{size * numbers:,} bytes {name}" for size, name in ((1, "fp8"), (2, "fp16"), (4, "fp32")))
    rows.append(("KV of a token", kept))
    if any(group_layers(spec).windows):
        whole, held = 2 * numbers * spec.max_len, _text_bytes(spec, spec.max_len)
        longest = f"KV of {spec.max_len:,} tokens"
        rows.append((longest, f"{show_size(held)} fp16; without windows it were {show_size(whole)}"))
    return rows


def _text_bytes(spec: ModelSpec, length: int) -> int:
    """KV that a text of so many tokens holds at most, in fp16, with blocks and iterations as they are by default."""
    config, groups = EngineConfig.model_construct(), group_layers(spec)
    block = kv_bytes_per_block(groups.depth, config.block_size, spec.num_kv_heads, spec.head_dim) // 2
    return kv_groups(config, groups).most(length) * block


def _batches(spec: ModelSpec, stored: int, room: int) -> list[tuple[str, str]]:
    """Requests that fit beside the weights as stored, with KV in fp16."""
    room_for_kv = max(0, room - stored)
    lengths = sorted({min(TYPICAL, spec.max_len), spec.max_len})
    fit = ", ".join(f"{room_for_kv // _text_bytes(spec, length):,} of {length:,} tokens" for length in lengths)
    if any(group_layers(spec).windows):
        return [(f"in {show_size(room)}", f"a batch of {fit}")]
    tokens = room_for_kv // (kv_bytes_per_block(spec.num_layers, 1, spec.num_kv_heads, spec.head_dim) // 2)
    return [(f"in {show_size(room)}", f"at most {tokens:,} tokens of KV: a batch of {fit}")]
