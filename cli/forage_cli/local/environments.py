"""What the settings say about environments, compared with the questions and with a rollout service that runs."""

from __future__ import annotations

import pyarrow.parquet as parquet

from forage_queue.streams.client import StreamClient
from forage_records.questions import check_environments
from forage_runtime.errors import SettingsError, UnavailableError, UserError
from forage_runtime.settings import Settings

_PROBE_S = 2.0


def find_environment_problems(settings: Settings) -> list[str]:
    """Compare the environments; one sentence per problem. The question files must be readable."""
    sources: set[str] = set()
    for file in (*settings.data.train_paths, *settings.data.val_files):
        sources |= {str(name) for name in parquet.read_table(file, columns=["data_source"])[0].unique().to_pylist()}
    known = ", ".join(sorted(sources))
    problems = [
        f"rollout.environments.{source} is for a data source that no question has (they have {known})"
        for source in sorted(settings.rollout.environments.keys() - sources)
    ]
    section = settings.redis.model_copy(update={"timeout_s": min(_PROBE_S, settings.redis.timeout_s)})
    try:
        served = StreamClient(section, settings.run.id, patience_s=1).read_environments()
        if served is not None:
            check_environments(sources, settings.rollout.environment_names, served)
    except (UnavailableError, SettingsError):
        pass  # it need not run yet; what it refuses is said elsewhere
    except UserError as error:
        problems.append(str(error))
    return problems
