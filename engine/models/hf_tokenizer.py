"""The tokenizer of a Hugging Face folder: tokenizer.json as it is, with the template and token names beside it.

Knows that folder's file names; not the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from noria.engine.models.errors import ModelError
from noria.engine.models.safetensors_checkpoint import read_json
from noria.engine.wire.messages import TokenizerFiles


def hf_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read the folder's tokenizer. ModelError when there is no tokenizer.json, or it is broken."""
    path = folder / "tokenizer.json"
    try:
        content = path.read_text(encoding="utf-8")
        tokenizer = Tokenizer.from_str(content)
    except FileNotFoundError as error:
        raise ModelError(f"{folder}: no tokenizer.json in the folder") from error
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path}: broken tokenizer ({error})") from error
    config = read_json(folder / "tokenizer_config.json")
    names = {**read_json(folder / "special_tokens_map.json"), **config}
    tokens = {key: _spelling(value) for key, value in names.items() if key.endswith("_token")}
    named = {key: token for key, token in tokens.items() if token is not None}
    bos = named.pop("bos_token", None)
    return TokenizerFiles(
        tokenizer_json=content,
        chat_template=_chat_template(folder, config),
        bos_token=bos,
        eos_token=named.pop("eos_token", None),
        add_bos=_adds_bos(tokenizer, config, bos),
        special_tokens=named,
    )


def _spelling(value: Any) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read: {error}") from error
    template = read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list):  # several, each with a name
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[-1].get("template") if named else None
    return template if isinstance(template, str) else None


def _adds_bos(tokenizer: Tokenizer, config: dict[str, Any], bos: str | None) -> bool:
    if bos is None:
        return False
    if "add_bos_token" in config:
        return bool(config["add_bos_token"])
    return tokenizer.encode("", add_special_tokens=True).ids[:1] == [tokenizer.token_to_id(bos)]
