"""The users of a Redis server: files with their passwords, its access list, and who logs in with what.

The server that `forage demo` and `forage up` start keeps them in the folder of its run; `forage redis acl` makes them
for any other.
"""

from __future__ import annotations

import secrets
import threading
from pathlib import Path

import redis

from forage_queue.streams.connection import connect, load_functions, name_server, save_facts
from forage_queue.streams.users import Role, describe_all, hash_password, name_user
from forage_runtime.errors import SettingsError, UnavailableError, UserError
from forage_runtime.security.token_file import read_tokens
from forage_runtime.settings import Settings, load_settings
from forage_runtime.telemetry.logs import get_logger

USERS, PASSWORDS = "users.acl", "passwords"
_AGAIN_S = 0.1


def prepare_users(folder: Path, run: str) -> Path:
    """Write the access list of a run's own server, and the passwords that are missing; returns the list's file."""
    passwords = {role: hash_passwords(ensure_password(folder / PASSWORDS, role)) for role in Role}
    write_private(folder / USERS, describe_all(passwords, run))
    return folder / USERS


def log_in(settings: Settings, folder: Path, role: Role) -> Settings:
    """Settings with the user of a role of a server whose users are in this folder."""
    login = {"username": name_user(role), "password_file": folder / PASSWORDS / name_user(role)}
    return settings.model_copy(update={"redis": settings.redis.model_copy(update=login)})


def find_login(settings: Settings) -> Settings:
    """Settings with the login of the latest run, if they have none and are of the same server."""
    known, latest = settings.redis, settings.run.dir / "latest" / "settings.yaml"
    if known.username or known.password_file or "@" in known.url or not latest.is_file():
        return settings
    try:
        other = load_settings(latest, environ={}).redis
    except SettingsError:  # of another version of Forage
        return settings
    if other.url != known.url:
        return settings
    login = {"username": other.username, "password_file": other.password_file}
    return settings.model_copy(update={"redis": known.model_copy(update=login)})


def list_variables(folder: Path, role: Role) -> dict[str, str]:
    """The same as variables of a service's environment."""
    file = folder / PASSWORDS / name_user(role)
    return {"FORAGE__REDIS__USERNAME": name_user(role), "FORAGE__REDIS__PASSWORD_FILE": str(file)}


def ensure_password(folder: Path, role: Role, prefix: str = "forage") -> Path:
    """The file with a role's passwords, which gets one if it does not exist.

    Raises:
        UserError: it cannot be written.
    """
    file = folder / name_user(role, prefix)
    if not file.exists():
        write_private(file, f"{secrets.token_hex(24)}\n")
    return file


def add_password(file: Path) -> None:
    """Add a password behind the others: clients go on sending the first, and the server can learn the new one.

    Raises:
        UserError: there are two already.
    """
    known = read_tokens(file, "the file")
    if len(known) > 1:
        raise UserError(f"{file} has {len(known)} passwords: end the rotation that has begun with --drop-old first")
    write_private(file, "".join(f"{password}\n" for password in (*known, secrets.token_hex(24))))


def drop_old_passwords(file: Path) -> None:
    """Keep the newest password alone, which clients send from their next connect on.

    Raises:
        UserError: it is the only one.
    """
    known = read_tokens(file, "the file")
    if len(known) == 1:
        raise UserError(f"{file} has one password: add the new one with --add-password, and load the list first")
    write_private(file, f"{known[-1]}\n")


def hash_passwords(file: Path) -> list[str]:
    """The hashes of a file's passwords; each line is one that is valid."""
    return [hash_password(password) for password in read_tokens(file, "the file")]


def write_private(file: Path, text: str) -> None:
    """Write a file that only its owner may read.

    Raises:
        UserError: it cannot be written.
    """
    try:
        if file.is_file() and file.read_text(encoding="utf-8") == text:
            return  # a full disk is no reason not to start again
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = file.with_name(f".{file.name}.new")
        partial.unlink(missing_ok=True)
        partial.touch(mode=0o600, exist_ok=False)
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror}): give a folder that you may write to") from None


class FunctionLoader:
    """Loads the functions of the streams into a run's own server, as its administrator, as soon as it answers.

    They stay in the append-only file. After a restart they are loaded again all the same: the file may have been lost.
    """

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings = log_in(settings, folder, Role.ADMIN).redis
        self._over = threading.Event()
        self._loaded = threading.Event()

    def wait(self, timeout_s: float) -> None:
        """Wait until they are loaded, or the time is over: what calls them then says what is wrong."""
        self._loaded.wait(timeout_s)  # wait: has a time limit

    def start(self) -> None:
        threading.Thread(target=self._run, name="load-functions", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def _run(self) -> None:
        client, problem = connect(self._settings, patience_s=1), ""
        while not self._over.is_set():
            try:
                save_facts(client)  # first: who finds the functions finds these
                load_functions(client, name_server(self._settings))
                self._loaded.set()
                return
            except (redis.RedisError, UnavailableError) as error:
                if not isinstance(error, (redis.ConnectionError, redis.TimeoutError)) and str(error) != problem:
                    problem = str(error)
                    get_logger().warning("redis_functions_not_loaded", detail=problem)
            self._over.wait(_AGAIN_S)  # wait: until the server has started
