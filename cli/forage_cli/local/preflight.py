"""Checks before a start, all at once: files, ports, disk space; and those that services make when they start.

Each problem is one sentence with its remedy.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

from forage_cli.local.home import find_interpreter, is_installed
from forage_cli.local.stack import Program, list_addresses, measure_free_gib
from forage_queue.streams.client import StreamClient
from forage_records.training import list_training_checks
from forage_runtime.addresses import bind_socket
from forage_runtime.errors import DataError, UserError
from forage_runtime.files.corpus import read_rows
from forage_runtime.files.model_folder import check_model_folder
from forage_runtime.problems import PROBLEM, REMARKS, Check, require_all
from forage_runtime.settings import ENV_PREFIX, Settings
from forage_runtime.text.terminal import echo

CHECKED = (Program.REWARD, Program.RETRIEVER, Program.ROLLOUT, Program.TRAINER)
"""The services that check their own settings."""
_SPACE_GIB = 0.5
_PASSAGES = 100_000


def check_all(settings: Settings, programs: Iterable[Program]) -> None:
    """Run every check that takes no service's environment, and print what a user should know.

    Raises:
        UserError: every problem, a line each.
    """
    programs = tuple(programs)
    remarks: list[str] = []
    addresses = list_addresses(settings, programs).items()
    require_all(
        [
            lambda: remarks.extend(check_files(settings, training=Program.TRAINER in programs)),
            partial(check_space, settings.run.dir),
            *(partial(check_port, name, address) for name, address in addresses),
        ]
    )
    print_remarks(remarks)


def print_remarks(remarks: Iterable[str]) -> None:
    """Print what a user should know; warnings to stderr."""
    for remark in remarks:
        echo(remark, err=remark.startswith("warning"))


def check_settings(settings: Settings) -> list[str]:
    """Check the settings and the files that they name, and have each service make the checks of its start.

    Returns:
        What a user should know, a sentence each, which begin as `REMARKS`.

    Raises:
        UserError: every problem, a line each.
    """
    missing = [program for program in CHECKED if not is_installed(program)]
    remarks: list[str] = []
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(_ask, program, settings) for program in CHECKED if program not in missing]
        files: Check = lambda: remarks.extend(check_files(settings))  # noqa: E731 - one of the checks
        require_all([files, *(answer.result for answer in answers)])
    if missing:
        remarks.append(
            f"warning: what {', '.join(missing)} check was not checked: they are not installed here, and check it when "
            "they start"
        )
    return [*remarks, *(remark for answer in answers for remark in answer.result())]


def check_files(settings: Settings, training: bool = True) -> list[str]:
    """Check what this environment can: model folder, corpus, Redis' files and, when training, questions and rewards.

    Returns, raises: as `check_settings`.
    """
    remarks: list[str] = []
    require_all(_list_checks(settings, training, remarks))
    return remarks


def _list_checks(settings: Settings, training: bool, remarks: list[str]) -> Iterator[Check]:
    yield lambda: check_model_folder(settings.model.path, weights=not settings.rollout.engine.endpoint)
    if settings.retriever.index is None and not settings.retriever.shards:
        yield partial(check_corpus, settings.data.corpus)
    yield lambda: StreamClient(settings.redis, settings.run.id)
    if training:
        yield from list_training_checks(settings)
        yield lambda: remarks.extend(f"warning: {sentence}" for sentence in check_questions(settings))


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
        UserError: a data source has no reward; or both, a line each.
    """
    warnings: list[str] = []
    data = settings.data
    splits = {"data.train_files": data.train_paths, "data.val_files": data.val_files}
    require_all(partial(_check_split, settings, split, files, warnings) for split, files in splits.items())
    return warnings


def _check_split(settings: Settings, split: str, files: Sequence[Path], warnings: list[str]) -> None:
    from forage_records.questions import check_batch_size, check_routes, read_questions

    require_all(partial(read_questions, [file]) for file in files if not file.is_file())  # each that is missing
    questions = read_questions(files)
    for place, file in enumerate(files):
        sources = {question.data_source for question in questions.rows if question.file == place}
        check_routes(sources, settings.reward.routes, str(file), "this configuration")
    if split == "data.train_files":
        check_batch_size(questions.rows, settings.data.train_batch_size, settings.data.train_weights)
    if wordless := questions.describe_wordless():
        warnings.append(f"{split}: {wordless}")


def _ask(program: Program, settings: Settings) -> list[str]:
    """Have a service check the settings in its Python environment; returns its remarks.

    Raises:
        UserError: every problem that it finds, a line each.
    """
    command = [str(find_interpreter(program)), "-m", f"forage_{program}.checks", "--config", "/dev/stdin"]
    # The settings are resolved: variables of the shell must not override the command line again.
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    done = subprocess.run(
        command, input=settings.to_yaml(), env=environ, capture_output=True, text=True, encoding="utf-8"
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise UserError(f"the {program} service cannot check its settings ({last[0]}): run 'forage doctor'")
    lines = done.stdout.splitlines()
    if problems := [line.removeprefix(PROBLEM) for line in lines if line.startswith(PROBLEM)]:
        raise UserError("\n".join(problems))
    return [line for line in lines if line.startswith(REMARKS)]


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
