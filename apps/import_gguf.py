"""Converts a GGUF file to a Hugging Face folder for ``model.path``.

    python -m apps.import_gguf --gguf FILE | --package NAME  --output FOLDER

``--package`` uses the only GGUF file inside an installed package, without importing the package. Quantized
weights are dequantized to float32.
"""

import argparse
import importlib.util
from pathlib import Path

from safetensors.numpy import save_file

from forgeasync.controller import exit_code
from forgeasync.models import GgufModel, read_tokenizer, save_tokenizer, use_umask, writing
from forgeasync.observability import exit_with
from forgeasync.schema import ConfigError, Problem


def find_in_package(package: str) -> Path:
    """Return the path of the GGUF file in an installed package.

    Raises:
        ConfigError: there is no such package, or it does not have exactly one GGUF file.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError([Problem(field="package", value=package, remedy="is not an installed package")])
    files = [
        file for folder in spec.submodule_search_locations for file in sorted(Path(folder).glob("*.gguf"))
    ]
    if len(files) != 1:
        remedy = f"has {len(files)} GGUF files, must have one; give --gguf FILE"
        raise ConfigError([Problem(field="package", value=package, remedy=remedy)])
    return files[0]


def import_gguf(file: Path, output: Path) -> GgufModel:
    """Convert a GGUF file to the folder ``output``, atomically; return the model that was read.

    Raises:
        ConfigError: the folder exists, or the file is not supported.
        FolderNotWritten: the disk is full or fails.
    """
    if output.exists():
        raise ConfigError([Problem(field="output", value=str(output), remedy="exists already; remove it")])
    model = GgufModel(file)
    tokenizer = read_tokenizer(model)
    with writing(output) as partial:
        model.config.save_pretrained(partial)
        model.generation_config().save_pretrained(partial)
        save_tokenizer(tokenizer, partial)
        save_file(dict(model.tensors()), partial / "model.safetensors", metadata={"format": "pt"})
        use_umask(partial / "model.safetensors")
    return model


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m apps.import_gguf", description="Convert a GGUF file to a Hugging Face folder."
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--gguf", type=Path, metavar="FILE", help="file to convert")
    source.add_argument("--package", metavar="NAME", help="an installed package that ships one GGUF file")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="new folder")
    arguments = parser.parse_args()

    def run() -> None:
        file = find_in_package(arguments.package) if arguments.package else arguments.gguf
        model = import_gguf(file, arguments.output)
        kinds = ", ".join(f"{count} {kind}" for kind, count in model.quantization().items())
        print(f"wrote {arguments.output}, float32, from {file} (tensors: {kinds})")

    return exit_code(run)


if __name__ == "__main__":
    exit_with(main)
