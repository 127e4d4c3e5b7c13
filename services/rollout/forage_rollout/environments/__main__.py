"""`python -m forage_rollout.environments [--config FILE] [key=value …]`: checks every environment."""

from __future__ import annotations

import sys

from forage_rollout.environments.registry import load_environments
from forage_runtime.clients.retriever import RetrieverClient
from forage_runtime.errors import UserError
from forage_runtime.settings import settings_from_arguments


def main() -> None:
    try:
        settings = settings_from_arguments(sys.argv[1:])
        load_environments(settings, RetrieverClient.from_settings(settings)).kill()
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(error.exit_code) from None


main()
