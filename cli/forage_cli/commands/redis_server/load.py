"""`forage redis load`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from forage_cli.commands.options import Config, Overrides


def load(
    overrides: Overrides = None,
    config: Config = None,
    reload_users: Annotated[
        bool, typer.Option("--users", help="Also let the server read its ACL file again (ACL LOAD).")
    ] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Delete the functions of other versions of Forage, which no program uses.")
    ] = False,
) -> None:
    """Load the functions of this version of Forage into a server, as its administrator; in a cluster, into each node.

    Where programs have a user of 'forage redis acl', this is needed once for each version that changes a function, and
    again after a change of the server's appendfsync. Functions are in the server's append-only file and on its
    replicas. Those of other versions stay, for programs that still run. A user with all rights loads them by itself.

    Examples:

      forage redis load redis.url=redis://host:6379/0 redis.username=admin redis.password_file=admin-password

      forage redis load --config runs/latest/settings.yaml --users
    """
    import redis

    from forage_cli.local.redis.users import PASSWORDS, log_in
    from forage_queue.streams.connection import connect_all, load_functions, name_server, save_facts, translate_error
    from forage_queue.streams.functions import FACTS, LIBRARY_PREFIX, build_library
    from forage_queue.streams.users import Role, name_user
    from forage_runtime.errors import UserError
    from forage_runtime.settings import load_settings

    settings = load_settings(config, overrides or [])
    own = settings.run.folder / "redis"
    is_own = settings.redis.username in ("", name_user(Role.CLI)) and "@" not in settings.redis.url
    if is_own and (own / PASSWORDS).is_dir():
        settings = log_in(settings, own, Role.ADMIN)
    where, library = name_server(settings.redis), build_library()
    try:
        for client in connect_all(settings.redis, patience_s=10):
            facts = save_facts(client)
            is_new = load_functions(client, where)
            found = {_read_name(row) for row in client.function_list(f"{LIBRARY_PREFIX}*")}
            kept = {FACTS, library.name}
            for name in sorted(found - kept):
                if prune:
                    client.function_delete(name)
                typer.echo(f"{name}: {'deleted' if prune else 'of another version; --prune deletes it'}")
            if reload_users:
                client.acl_load()
            typer.echo(f"{library.name}: {'loaded' if is_new else 'was there'}; {facts}")
    except redis.RedisError as error:
        raise translate_error(error, where) or UserError(f"{where}: {error}") from error


def _read_name(row: Any) -> str:
    """The name of a library: answers are tables in the newer protocol, and lists of names and values in the older."""
    name = row[b"library_name"] if isinstance(row, dict) else row[1]
    return str(name.decode() if isinstance(name, bytes) else name)
