"""`forage redis acl`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forage_runtime.text.terminal import echo

if TYPE_CHECKING:
    from forage_queue.streams.users import Role


class Form(StrEnum):
    """What `forage redis acl` prints."""

    ACLFILE = "aclfile"
    COMMANDS = "commands"
    RULES = "rules"


def acl(
    run: Annotated[
        str, typer.Option(help="Only the keys of this run (run.id). Without it those of all runs.", show_default=False)
    ] = "",
    users: Annotated[
        str,
        typer.Option(
            help="Roles, separated by commas: trainer, rollout, cli, console, exporter, keda, admin."
            " Without it all of them, and admin in an aclfile alone.",
            show_default=False,
        ),
    ] = "",
    form: Annotated[
        Form,
        typer.Option(
            "--format",
            help="aclfile: the whole file of a server that is for Forage alone; commands: ACL SETUSER for a server that"
            " others use too; rules: without passwords.",
        ),
    ] = Form.ACLFILE,
    passwords: Annotated[
        Path, typer.Option(help="Folder with a file for each user. Missing ones are made, with a random password.")
    ] = Path("redis-passwords"),
    prefix: Annotated[str, typer.Option(help="Users are called PREFIX-trainer and so on.")] = "forage",
    add_password: Annotated[
        bool, typer.Option("--add-password", help="Begin a rotation: a second password for each of the users.")
    ] = False,
    drop_old: Annotated[
        bool, typer.Option("--drop-old", help="End a rotation: keep the newest password of each of the users.")
    ] = False,
) -> None:
    """Print the access list (ACL) of Forage's users, with their passwords as SHA-256 hashes.

    The files with the passwords are for redis.password_file of each program, beside redis.username. Each line is a
    password: programs send the first, the server accepts all of them.

    To replace passwords while a run goes on: --add-password, let the server load the list (ACL LOAD), then --drop-old,
    and let it load the list again. Programs read the file at each connect.

    Examples:

      forage redis acl --passwords secrets > users.acl

      forage redis acl --run nq-7b --users trainer,rollout --format commands | redis-cli
    """
    from forage_cli.local.redis import users as files
    from forage_queue.streams.users import SERVICES, Role, describe_all, list_rules, name_user
    from forage_runtime.errors import UserError

    if add_password and drop_old:
        raise UserError("--add-password begins a rotation and --drop-old ends it: give one of them")
    everybody = tuple(Role) if form is Form.ACLFILE else SERVICES
    roles = [_parse_role(name) for name in users.split(",")] if users else list(everybody)
    if form is Form.RULES:
        for role in roles:
            echo(" ".join([name_user(role, prefix), *list_rules(role, run or None)]))
        return
    hashes = {}
    for role in roles:
        file = files.ensure_password(passwords, role, prefix)
        if add_password:
            files.add_password(file)
        elif drop_old:
            files.drop_old_passwords(file)
        hashes[role] = files.hash_passwords(file)
    if form is Form.ACLFILE:
        typer.echo(describe_all(hashes, run or None, prefix), nl=False)
        return
    for role in roles:
        words = ["on", *(f"#{word}" for word in hashes[role]), *list_rules(role, run or None)]
        echo(" ".join(["ACL SETUSER", name_user(role, prefix), "reset", *words]))


def _parse_role(name: str) -> Role:
    from forage_queue.streams.users import Role
    from forage_runtime.errors import UserError

    try:
        return Role(name.strip())
    except ValueError:
        raise UserError(f"--users {name} is no role: give {', '.join(Role)}") from None
