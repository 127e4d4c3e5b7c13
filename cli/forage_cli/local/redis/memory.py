"""What a Redis server gives a recipe's groups, and whether it can lose them."""

from __future__ import annotations

from forage_cli.local.redis.users import find_login
from forage_cli.planning.streams import estimate_stream_memory, format_bytes, format_maxmemory
from forage_queue.streams.client import StreamClient
from forage_queue.streams.durability import check_durability
from forage_runtime.errors import SettingsError, UnavailableError
from forage_runtime.settings import Settings

_PROBE_S = 2.0


def check_redis(settings: Settings) -> list[str]:
    """Check the server, if it answers, and what it may hold of the recipe's groups; one sentence per problem."""
    memory = estimate_stream_memory(settings)
    limit, maxmemory, problems = settings.redis.max_stream_bytes, 0, []
    try:
        section = find_login(settings).redis.model_copy(update={"timeout_s": min(_PROBE_S, settings.redis.timeout_s)})
        client = StreamClient(section, settings.run.id, patience_s=1)
        problems = [f"Redis can lose what it has acknowledged: {text}" for text in check_durability(client, section)]
        limit, maxmemory = client.read_byte_limit(), int(client.read_server("memory")["maxmemory"])
    except UnavailableError:
        pass  # it need not run yet
    except SettingsError as error:
        problems.append(str(error))
    if limit and limit < memory.training:
        effect = "the trainer saves checkpoints more often than trainer.save_freq says"
        if limit < memory.batch:
            effect = "not even one batch fits, and training is slowed down"
        problems.append(
            f"redis.max_stream_bytes is {format_bytes(limit)}, and groups take up to {format_bytes(memory.training)}:"
            f" {effect}; raise it or the server's maxmemory, or lower trainer.save_freq"
        )
    if maxmemory and maxmemory < memory.training + memory.validation:
        problems.append(
            f"Redis has a maxmemory of {format_bytes(maxmemory)}, and groups of training and validation take up to"
            f" {format_bytes(memory.training + memory.validation)}: raise it to {format_maxmemory(memory.maxmemory)}"
        )
    return problems
