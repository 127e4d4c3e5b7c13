"""Checks before a start: files, folders, ports, disk space. Each error is one sentence with its remedy."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from forage_cli.local.stack import Program, find_interpreter, is_installed, list_addresses, measure_free_gib
from forage_records.training import check_training
from forage_runtime.addresses import bind_socket
from forage_runtime.errors import DataError, UserError
from forage_runtime.files.corpus import read_rows
from forage_runtime.files.lucene import explain_lucene
from forage_runtime.files.model_folder import check_model_folder, read_chat_template
from forage_runtime.settings import ENV_PREFIX, Settings
from forage_runtime.text.terminal import echo

_SPACE_GIB = 0.5
_PASSAGES = 100_000
_NOTEWORTHY = re.compile(r"think|thought|strftime_now|assistant:", re.IGNORECASE)
"""What a chat template has that may matter to a run; most have none of it, and asking takes seconds."""


def check_all(settings: Settings, programs: Iterable[Program]) -> None:
    """Run every check, and print what a user should know.

    Raises:
        UserError: the first problem.
    """
    programs = tuple(programs)
    warnings = check_files(settings, training=Program.TRAINER in programs)
    check_space(settings.run.dir)
    for name, address in list_addresses(settings, programs).items():
        check_port(name, address)
    for warning in warnings:
        echo(f"warning: {warning}", err=True)


def check_files(settings: Settings, training: bool = True) -> list[str]:
    """Check the model folder, the corpus, the environments and, when training, the questions and their rewards.

    Returns:
        What a user should know of the files that can be used, a sentence each.

    Raises:
        UserError: the first problem.
    """
    endpoint = settings.rollout.engine.endpoint
    if training and endpoint:
        raise UserError(f"rollout.engine.endpoint is {endpoint}: a remote model cannot be trained; unset it")
    check_model_folder(settings.model.path, weights=not endpoint)
    check_corpus(settings.data.corpus)
    if settings.retriever.index is not None and (lucene := explain_lucene(settings.retriever.index)):
        raise UserError(f"retriever.index: {lucene}")
    check_environments(settings)
    if not training:
        return []
    check_training(settings)
    return check_questions(settings)


def check_corpus(path: Path) -> None:
    """Check that the corpus has passages, as the retriever reads them: the first `_PASSAGES`; the retriever checks all.

    Raises:
        DataError: a file cannot be read, a line is not a passage, or two passages have one id.
    """
    places: dict[str, str] = {}
    with closing(read_rows(path)) as rows:
        for where, fields, _ in itertools.islice(rows, _PASSAGES):
            if (first := places.setdefault(str(fields["id"]), where)) != where:
                raise DataError(f"{where}: the passage has the id {fields['id']!r} of {first}: make ids unique")
        if not places:
            raise DataError(f"data.corpus {path} is empty: make one with 'forage data world' or give another")


def check_questions(settings: Settings) -> list[str]:
    """Check the question files as the trainer reads them, and that each data source has a reward.

    Returns:
        What a user should know of them, a sentence each.

    Raises:
        DataError: a file cannot be read, or has too few questions.
        UserError: a data source has no reward.
    """
    from forage_records.questions import check_batch_size, check_routes, read_questions

    data, warnings = settings.data, []
    for split, files in (("data.train_files", data.train_paths), ("data.val_files", data.val_files)):
        questions = read_questions(files)
        for place, file in enumerate(files):
            sources = {question.data_source for question in questions.rows if question.file == place}
            check_routes(sources, settings.reward.routes, str(file), "this configuration")
        if split == "data.train_files":
            check_batch_size(questions.rows, data.train_batch_size, data.train_weights)
        if wordless := questions.describe_wordless():
            warnings.append(f"{split}: {wordless}")
    return warnings


def check_environments(settings: Settings) -> None:
    """Check that each environment class can be loaded, in the Python environment of the rollout service."""
    if not settings.rollout.environments:
        return
    _ask(Program.ROLLOUT, "forage_rollout.environments", settings)


def check_sampling(settings: Settings) -> list[str]:
    """Check that vLLM takes what the settings sample with, in the Python environment of the rollout service.

    Returns: a sentence where that is not installed here, as in the image of the command line.
    """
    if not is_installed(Program.ROLLOUT):
        return ["whether vLLM can sample so was not checked: the rollout service is not installed here, and checks it"]
    _ask(Program.ROLLOUT, "forage_rollout.engine.sampling_check", settings)
    return []


def find_template_problems(settings: Settings) -> list[str]:
    """What of the chat template matters to a run, a line each: the trainer is asked where there may be anything."""
    if not settings.data.apply_chat_template_kwargs and not _NOTEWORTHY.search(read_chat_template(settings.model.path)):
        return []
    if not is_installed(Program.TRAINER):
        return ["note it was not looked at: the trainer is not installed here, and looks at it when it starts"]
    return _ask(Program.TRAINER, "forage_trainer.model_check.short", settings).splitlines()


def _ask(program: Program, module: str, settings: Settings) -> str:
    """Run a check in the Python environment of a service; returns what it prints."""
    command = [str(find_interpreter(program)), "-m", module, "--config", "/dev/stdin"]
    # The settings are resolved: variables of the shell must not override the command line again. What libraries warn of
    # is no part of the answer.
    left_out = (ENV_PREFIX, "PYTHONWARNDEFAULTENCODING")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    environ["PYTHONWARNINGS"] = "ignore"
    done = subprocess.run(
        command, input=settings.to_yaml(), env=environ, capture_output=True, text=True, encoding="utf-8"
    )
    if done.returncode:
        raise UserError(done.stderr.strip())
    return done.stdout


def check_space(folder: Path) -> None:
    """Check the disk space for a run's checkpoints, policies and logs."""
    free = measure_free_gib(folder)
    if free < _SPACE_GIB:
        raise UserError(
            f"{folder.absolute()} has {free:.2f} GiB free, a run needs {_SPACE_GIB}: free space or set run.dir"
        )


def check_port(name: str, address: str) -> None:
    """Check that the address is free."""
    try:
        bind_socket(address).close()
    except UserError as error:
        raise UserError(f"{name}: {error} (--base-port moves all of them)") from None
