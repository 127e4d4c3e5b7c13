"""`forage redis`: users and functions of a Redis server."""

from __future__ import annotations

import typer

from forage_cli.commands.redis_server.acl import acl
from forage_cli.commands.redis_server.load import load

app = typer.Typer(
    help="Users and functions of a Redis server.\n\n"
    "Each program has a user of its own: `forage-trainer`, `forage-rollout`, `forage-cli`, `forage-console`,"
    " `forage-exporter`, `forage-keda`. None of them may run Lua of its own or administer the server. The rules of the"
    " streams are functions in the server, which its administrator loads. The server of 'forage demo' and 'forage up',"
    " that of compose and that of the chart have all this; these commands set up another one.",
    no_args_is_help=True,
)
app.command("acl")(acl)
app.command("load")(load)
