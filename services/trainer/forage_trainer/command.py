"""`forage trainer`: commands on a run's checkpoints, which run in the trainer's own environment."""

from __future__ import annotations

import logging
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from forage_runtime.command import run_command
from forage_runtime.security.signatures import RunSignatures
from forage_runtime.settings import PublishSettings, SecuritySettings
from forage_runtime.telemetry.logs import configure_logs
from forage_runtime.text.console import TextConsole

app = typer.Typer(
    help="Checkpoints of the trainer, for other programs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


class Precision(StrEnum):
    """Types of exported weights."""

    BF16 = "bf16"
    FP32 = "fp32"


@app.callback()
def trainer() -> None:
    """Checkpoints of the trainer, for other programs."""


@app.command("export")
def export_checkpoint(
    source: Annotated[Path, typer.Argument(help="A run's folder, or one checkpoint of it.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="Folder to make.", show_default=False)],
    best: Annotated[bool, typer.Option("--best", help="Of a run: the best checkpoint, not the newest.")] = False,
    dtype: Annotated[Precision, typer.Option("--dtype", help="Type of the weights.")] = Precision.BF16,
    shard_bytes: Annotated[int, typer.Option("--shard-bytes", min=1, help="Largest file of weights.")] = (
        PublishSettings().shard_bytes
    ),
    verify_key: Annotated[
        Path | None,
        typer.Option("--verify-key", help="Only a checkpoint that one of the public keys of this file has signed."),
    ] = None,
) -> None:
    """Write a checkpoint's policy as a Hugging Face folder, which transformers and vLLM load."""
    import torch

    from forage_trainer.checkpoints.export import export_policy, find_checkpoint

    # Reading shards outside a process group makes torch warn that nothing can be compiled; nothing is compiled here.
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    checkpoint = find_checkpoint(source, best)
    signatures = None
    if verify_key is not None:
        # A run's folder has its name, and a checkpoint is two levels below.
        run = checkpoint.resolve().parents[1].name
        signatures = RunSignatures(SecuritySettings(require_signed=True, verify_key_file=verify_key), run)
    precision = torch.bfloat16 if dtype is Precision.BF16 else torch.float32
    files = export_policy(checkpoint, out, precision, shard_bytes, signatures)
    size = sum(file.bytes for file in files)
    TextConsole().print(
        f"{out}: {checkpoint.name} as {dtype.value}, {len(files)} file(s) of weights, {size / 1e6:.1f} MB"
    )


def main() -> None:
    """Entry point of `python -m forage_trainer.command`: a user's error is one sentence and exit code 2."""
    configure_logs("trainer", "WARNING")
    run_command(app, "forage trainer")


if __name__ == "__main__":
    main()
