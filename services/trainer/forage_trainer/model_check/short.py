"""`python -m forage_trainer.model_check.short --config FILE`: what of the template matters to a run, a line a fact."""

from __future__ import annotations

import sys

from forage_runtime.errors import UserError
from forage_runtime.settings import settings_from_arguments
from forage_runtime.text.chat_template import ChatTemplate
from forage_trainer.chats.chat_tokenizer import load_tokenizer
from forage_trainer.chats.template_facts import list_matters


def main() -> None:
    """Print the facts; exit code 2 and a sentence where the folder cannot be read."""
    try:
        settings = settings_from_arguments(sys.argv[1:])
        facts = list_matters(ChatTemplate(load_tokenizer(settings.model.path)), settings)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(error.exit_code) from None
    for fact in facts:
        sys.stdout.write(f"{fact.level} {fact.describe()}\n")


if __name__ == "__main__":
    main()
