"""The settings of a run that is to be trained: a new one, or one that goes on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from forage_cli.local.home import DEMO, find_home, load_recipe
from forage_cli.local.processes import find_supervisor
from forage_cli.local.stack import RECORD, shift_ports
from forage_runtime.errors import UserError
from forage_runtime.settings import Settings, load_settings


def load_demo_settings(seed: int, config: Path | None, overrides: Sequence[str], base_port: int | None) -> Settings:
    """Load the settings of a new demo; the run id contains its start time."""
    fresh = [f"run.id=demo-{time.strftime('%Y%m%d-%H%M%S')}-seed{seed}", f"run.seed={seed}"]
    return load_recipe(config or find_home() / DEMO, [*fresh, *shift_ports(base_port), *overrides])


def load_resumed_settings(overrides: Sequence[str], base_port: int | None = None) -> Settings:
    """Load the settings that a run was started with, with overrides: of the latest, or of the id in the overrides.

    Raises:
        UserError: there is no such run.
    """
    # `latest` links to the folder of a run, whose settings have its own id.
    wanted = load_settings(None, ["run.id=latest", *overrides]).run
    file = wanted.folder / "settings.yaml"
    if not file.is_file():
        which = "run to resume" if wanted.id == "latest" else f"run {wanted.id} to resume"
        raise UserError(f"there is no {which} in {wanted.dir}: start one with 'forage train' or 'forage demo'")
    return load_settings(file, [*shift_ports(base_port), *overrides])


def load_train_settings(config: Path | None, overrides: Sequence[str], base_port: int | None, resume: bool) -> Settings:
    """Load the settings of `forage train`, whose run has the id that they say.

    Raises:
        UserError: neither a file nor a run to resume is given, the run exists and is not to be resumed, or it does
            not exist and is.
    """
    if config is None:
        if not resume:
            raise UserError(
                "give the settings of the run: forage train -c FILE; without a file, 'forage train --resume' continues"
                " the latest run, and 'forage demo' trains the tiny policy"
            )
        return load_resumed_settings(overrides, base_port)
    settings = load_recipe(config, [*shift_ports(base_port), *overrides])
    exists = (settings.run.folder / "settings.yaml").is_file()
    if exists and not resume:
        check_not_in_use(settings)
        raise UserError(
            f"{settings.run.folder} has a run already: continue it with --resume, or choose another id with run.id=NAME"
        )
    if resume and not exists:
        raise UserError(f"there is no run {settings.run.id} to resume in {settings.run.dir}: start it without --resume")
    return settings


def check_not_in_use(settings: Settings) -> None:
    """Check that no other command runs the services of this run.

    Raises:
        UserError: one does.
    """
    supervisor = find_supervisor(settings.run.folder.absolute() / RECORD)
    if supervisor is not None:
        raise UserError(
            f"the run {settings.run.id} is in use: process {supervisor.pid} runs its services; stop that one with"
            f" Ctrl-C or 'kill {supervisor.pid}', or choose another id with run.id=NAME"
        )
