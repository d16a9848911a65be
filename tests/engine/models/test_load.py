"""From a typed name to a loaded model, and every way in which that fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models, processors
from transformers import LlamaConfig, LlamaForCausalLM

from noria.engine.models.errors import ModelError
from noria.engine.models.generation import sampling_defaults
from noria.engine.models.load import inspect, load, tokenizer_files
from noria.engine.models.source import list_models, resolve
from noria.kernels.torch_ops import TorchOps


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama folder with a tokenizer that puts <s> in front."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 6, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, eos_token_id=1, max_position_embeddings=64)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "tiny")
    tokenizer = Tokenizer(models.BPE(vocab={"<s>": 0, "</s>": 1, "a": 2, "b": 3}, merges=[]))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(tmp_path / "tiny" / "tokenizer.json"))
    write(tmp_path / "tiny" / "tokenizer_config.json", bos_token={"content": "<s>"}, eos_token="</s>", pad_token=None)
    write(tmp_path / "tiny" / "generation_config.json", eos_token_id=[1, 3])
    return tmp_path / "tiny"


def write(path: Path, **content: Any) -> None:
    path.write_text(json.dumps(content))


def change(path: Path, **content: Any) -> None:
    write(path, **(json.loads(path.read_text()) | content))


def test_a_folder_is_loaded(folder: Path) -> None:
    source = resolve(str(folder))
    assert (source.name, source.kind) == ("tiny", "safetensors") and source.size_bytes > 0
    assert inspect(source).eos_token_ids == (1, 3)
    seen: list[tuple[int, int]] = []
    loaded = load(source, TorchOps(), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == 2 * loaded.spec.num_parameters  # two bytes each on disk
    files = tokenizer_files(source)
    assert (files.bos_token, files.eos_token, files.add_bos, files.chat_template) == ("<s>", "</s>", True, None)
    assert loaded.fingerprint == load(source, TorchOps()).fingerprint and loaded.fingerprint.startswith("fp_")


def test_templates_beside_the_tokenizer(folder: Path) -> None:
    config = folder / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    change(config, chat_template=named, add_bos_token=False)
    files = tokenizer_files(resolve(str(folder)))
    assert files.chat_template == "D" and not files.add_bos
    (folder / "chat_template.jinja").write_text("J")
    assert tokenizer_files(resolve(str(folder))).chat_template == "J"


def test_the_fingerprint_follows_the_weights(folder: Path) -> None:
    before = load(resolve(str(folder)), TorchOps()).fingerprint
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(2)
    model.save_pretrained(folder)
    assert load(resolve(str(folder)), TorchOps()).fingerprint != before


def test_the_demo_model_is_found() -> None:
    source = resolve("smollm2-135m-instruct")
    assert (source.name, source.kind, source.path.suffix) == ("smollm2-135m-instruct", "gguf", ".gguf")
    assert source in list_models()
    assert inspect(source).weight_bytes == 4 * (134_515_008 + 49152 * 576)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("no-such-model", "no such model; give the alias smollm2-135m-instruct"),
        ("./nowhere", "no such file or folder"),
        ("nowhere.gguf", "no such file or folder"),
    ],
)
def test_names_that_lead_nowhere(typed: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve(typed)


def test_wrong_files_and_folders(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not one")
    with pytest.raises(ModelError, match=r"x\.gguf: not a GGUF file"):
        resolve(str(tmp_path / "x.gguf"))
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve(str(tmp_path))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        tokenizer_files(resolve(str(folder)))


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"architectures": ["BloomForCausalLM"]}, "architecture 'BloomForCausalLM' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantised checkpoints \(awq\)"),
        ({"sliding_window": 128}, "sliding_window = 128 is not supported"),
        ({"hidden_act": "relu2"}, "activation 'relu2'"),
        ({"rope_parameters": {"rope_type": "axial", "rope_theta": 1e4, "factor": 2.0}}, "rope scaling 'axial'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, r"config\.json: 'factor' is missing"),
        ({"hidden_size": "many"}, "config.json"),
        ({"num_hidden_layers": 2}, r"tensor model\.layers\.1\.input_layernorm\.weight is missing"),
        ({"vocab_size": 7}, r"has shape \[6, 16\], expected \[7, 16\]"),
    ],
)
def test_unsupported_and_inconsistent_configs(folder: Path, field: dict[str, Any], message: str) -> None:
    change(folder / "config.json", **field)
    with pytest.raises(ModelError, match=message):
        load(resolve(str(folder)), TorchOps())


def test_a_truncated_safetensors_file_is_one_clear_line(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors: broken or truncated"):
        load(resolve(str(folder)), TorchOps())


def test_quantised_weights_are_named_with_their_file_though_config_is_silent(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"model.layers.0.mlp.up_proj.qweight": torch.zeros(2, dtype=torch.int32)}, path)
    with pytest.raises(ModelError, match=r"model\.safetensors: tensor .*up_proj\.qweight: quantised checkpoints"):
        inspect(resolve(str(folder)))
    save_file(weights | {"model.norm.weight": torch.ones(16, dtype=torch.int8)}, path)
    with pytest.raises(ModelError, match=r"model\.safetensors: tensor model\.norm\.weight holds torch\.int8"):
        load(resolve(str(folder)), TorchOps())


def test_sampling_that_the_folder_asks_for(folder: Path) -> None:
    path = folder / "generation_config.json"
    write(path, temperature=0.7, top_k=20, top_p=None, do_sample=True, max_new_tokens=9)
    assert sampling_defaults(resolve(str(folder))) == {"temperature": 0.7, "top_k": 20}
    write(path, top_p=1.5)
    with pytest.raises(ModelError, match=r"generation_config\.json: top_p = 1\.5 is not between 0\.0 and 1\.0"):
        sampling_defaults(resolve(str(folder)))
