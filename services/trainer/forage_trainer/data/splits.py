"""The questions of a run: of training and of validation, those that are too long left out."""

from __future__ import annotations

from typing import NamedTuple

from forage_queue.trainer.feeder import make_batches
from forage_records.questions import Questions, read_questions
from forage_runtime.settings import Settings
from forage_trainer.chats.chat_tokenizer import ChatTokenizer
from forage_trainer.extensions import find_sampler


class Splits(NamedTuple):
    """The questions of a run, and the tokenizer that measured them."""

    train: Questions
    validation: Questions
    tokenizer: ChatTokenizer


def read_splits(settings: Settings) -> Splits:
    """Read and measure the questions, and check that they make batches.

    Raises:
        UserError: a file, the tokenizer, its chat template or the sampler is at fault, or too few questions are left.
    """
    data, longest = settings.data, settings.rollout.max_start_length
    train, validation = read_questions(data.train_paths), read_questions(data.val_files)
    make_batches(train.rows, settings, find_sampler(settings))
    tokenizer = ChatTokenizer(settings)
    train = train.filter_by_length(tokenizer, longest)
    validation = validation.filter_by_length(tokenizer, longest, data.val_max_samples)
    make_batches(train.rows, settings, find_sampler(settings))
    return Splits(train, validation, tokenizer)
