"""Checks before a start: files, folders, ports, disk space. Each error is one sentence with its remedy."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
from collections.abc import Iterable
from pathlib import Path

from forage_cli.local.stack import Program, find_interpreter, list_addresses, measure_free_gib
from forage_common.addresses import port_in_use_error, split_address
from forage_common.errors import DataError, UserError
from forage_common.files.lucene import explain_lucene
from forage_common.files.model_folder import check_model_folder
from forage_common.settings import ENV_PREFIX, Settings

COLUMNS = ("data_source", "prompt", "reward_model", "extra_info")
_SPACE_GIB = 0.5
_CORPUS_LINES = 100_000


def check_all(settings: Settings, programs: Iterable[Program]) -> None:
    """Run every check.

    Raises:
        UserError: the first problem.
    """
    programs = tuple(programs)
    check_files(settings, training=Program.TRAINER in programs)
    check_space(settings.run.dir)
    for name, address in list_addresses(settings, programs).items():
        check_port(name, address)


def check_files(settings: Settings, training: bool = True) -> None:
    """Check the model folder, the corpus, the environments and, when training, the questions and their rewards."""
    endpoint = settings.rollout.engine.endpoint
    if training and endpoint:
        raise UserError(f"rollout.engine.endpoint is {endpoint}: a remote model cannot be trained; unset it")
    check_model_folder(settings.model.path, weights=not endpoint)
    check_corpus(settings.data.corpus)
    if settings.retriever.index is not None and (lucene := explain_lucene(settings.retriever.index)):
        raise UserError(f"retriever.index: {lucene}")
    check_environments(settings)
    if training:
        settings.check_sampling()
        settings.check_trajectory_length()
        for file in (*settings.data.train_paths, *settings.data.val_files):
            check_questions(file, set(settings.reward.routes))
    if settings.data.train_batch_size % settings.trainer.actor.ppo_mini_batch_size:
        raise UserError(
            f"trainer.actor.ppo_mini_batch_size={settings.trainer.actor.ppo_mini_batch_size} does not divide "
            f"data.train_batch_size={settings.data.train_batch_size}: choose a divisor"
        )


def check_corpus(file: Path) -> None:
    """Check that the corpus is JSONL of passages. Reads `_CORPUS_LINES` lines; the retriever checks all."""
    remedy = "make one with 'forage data world' or give another"
    try:
        number = 0
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(itertools.islice(lines, _CORPUS_LINES), 1):
                _check_passage(file, number, line)
            if number == 0:
                raise DataError(f"data.corpus {file} is empty: {remedy}")
    except OSError as error:
        raise DataError(f"data.corpus {file} cannot be read ({error.strerror}): {remedy}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"data.corpus {file} is not UTF-8 ({error.reason}): write it as UTF-8 JSONL") from None


def _check_passage(file: Path, number: int, line: str) -> None:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("id", "contents")):
        raise DataError(f'data.corpus {file}, line {number} is not a passage: expected {{"id": "…", "contents": "…"}}')


def check_questions(file: Path, routes: set[str]) -> None:
    """Check that a question file is Parquet in the Search-R1 layout, and that each data source has a reward."""
    import pyarrow
    import pyarrow.parquet as parquet

    from forage_records.questions import check_routes

    try:
        table = parquet.ParquetFile(file)
    except FileNotFoundError:
        raise DataError(
            f"question file {file} does not exist: make it with 'forage data' (its help lists the sets)"
        ) from None
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise DataError(f"question file {file} is not Parquet ({error}): write it with 'forage data'") from None
    missing = [name for name in COLUMNS if name not in table.schema_arrow.names]
    if missing:
        raise DataError(
            f"question file {file} lacks the column {', '.join(missing)}: Search-R1 Parquet has {', '.join(COLUMNS)}"
        )
    sources = table.read(columns=["data_source"]).column("data_source").unique().to_pylist()
    check_routes(map(str, sources), routes, str(file), "this configuration")


def check_environments(settings: Settings) -> None:
    """Check that each environment class can be loaded, in the Python environment of the rollout service."""
    if not settings.rollout.environments:
        return
    command = [str(find_interpreter(Program.ROLLOUT)), "-m", "forage_rollout.environments", "--config", "/dev/stdin"]
    # The settings are resolved: variables of the shell must not override the command line again.
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    done = subprocess.run(command, input=settings.to_yaml(), env=environ, capture_output=True, text=True)
    if done.returncode:
        raise UserError(done.stderr.strip())


def check_space(folder: Path) -> None:
    """Check the disk space for a run's checkpoints, policies and logs."""
    free = measure_free_gib(folder)
    if free < _SPACE_GIB:
        raise UserError(
            f"{folder.absolute()} has {free:.2f} GiB free, a run needs {_SPACE_GIB}: free space or set run.dir"
        )


def check_port(name: str, address: str) -> None:
    """Check that the address is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(split_address(address))
        except OSError as error:
            raise UserError(f"{name}: {port_in_use_error(address, error)} (--base-port moves all of them)") from None
