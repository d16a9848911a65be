"""The demo model's weights in another form: KIND SOURCE.gguf FOLDER. Runs in the environment of a peer that wants it.

All forms hold the numbers of the same file, so that all peers compute the same model. Kinds: q4_1.gguf (the file
itself), q8_0.gguf, fp32 (a Hugging Face folder), openvino (made of fp32).
"""

import subprocess
import sys
from pathlib import Path


def q8_0(source: Path, target: Path) -> None:
    """The same file with every matrix as Q8_0."""
    import gguf

    kind = gguf.GGMLQuantizationType.Q8_0
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    own = ("general.architecture", "general.file_type", "general.quantization_version")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in own:
            is_array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if is_array else None)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim > 1:
            writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def fp32(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = loaded.config.to_dict()
    config.pop("quantization_config", None)  # what came from GGUF is not saved as long as it is called quantised
    plain = type(loaded)(type(loaded.config).from_dict(config))
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


def openvino(source: Path, target: Path) -> None:
    command = [str(Path(sys.executable).parent / "optimum-cli"), "export", "openvino", "--weight-format=fp32"]
    task = "--task=text-generation-with-past"
    subprocess.run([*command, task, f"--model={source}", str(target)], check=True)


def main() -> None:
    kind, source, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    part = folder / f"part-{kind}"  # named as it should be only once it is whole
    if kind == "q4_1.gguf":
        part.symlink_to(source)
    elif kind == "openvino":
        openvino(folder / "fp32", part)
    else:
        {"q8_0.gguf": q8_0, "fp32": fp32}[kind](source, part)
    part.rename(folder / kind)


main()
