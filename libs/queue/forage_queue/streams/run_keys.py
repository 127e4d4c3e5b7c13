"""The keys of one run on a server: commands and scripts on them, repeated while the server is unavailable."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Sequence
from typing import Any

import redis

from forage_queue.streams.connection import connect, load_functions, name_server, translate_error
from forage_queue.streams.functions import FACTS, is_read_only, name_function
from forage_queue.streams.history import History
from forage_runtime.errors import FencedError, SettingsError
from forage_runtime.settings import RedisSettings

GROUP = "forage"
_NO_FUNCTION = "Function not found"
_NO_GROUP = re.compile(r"No such key '([^']+)'")  # names the stream; the keys of a script are not all streams


class RunKeys:
    """One run's keys. Thread-safe; every call is bounded in time.

    Every call raises `UnavailableError` if the server is unavailable for about `patience_s`.

    Raises:
        SettingsError: the file with the password cannot be read, or is empty; the server refuses the credentials.
    """

    def __init__(
        self, settings: RedisSettings, run_id: str, patience_s: float = 60.0, history: History | None = None
    ) -> None:
        self._redis = connect(settings, patience_s, f"forage:{{{run_id}}}:")
        self._settings = settings
        # The braces put all keys of a run on one node of a cluster, as scripts over several keys need it.
        self._prefix = f"forage:{{{run_id}}}:"
        self.prompts = self.key("prompts")
        self.trajectories = self.key("trajectories")
        self.history = history
        self.epoch = 0
        """That of the trainer which uses this client, once it has acquired one."""

    def key(self, name: str) -> str:
        """The full name of a key of the run."""
        return self._prefix + name

    def ping(self) -> bool:
        return bool(self._call(self._redis.ping))

    def create_groups(self, *streams: str) -> None:
        """Create the consumer group of each stream, from its beginning, unless it exists."""
        for stream in streams or (self.prompts, self.trajectories):
            self._run_unless_replaced("create_group", [stream], GROUP)

    def check_epoch(self) -> None:
        """
        Raises:
            FencedError: a later trainer has taken over.
        """
        latest = self.read_epoch()
        if latest > self.epoch:
            raise _make_fenced_error(latest)

    def read_epoch(self) -> int:
        """The epoch of the latest trainer; 0 before the first."""
        return int(self._call(self._redis.get, self.key("epoch")) or 0)

    def read_server(self, section: str) -> dict[str, Any]:
        """Read a section of what the server says about itself (INFO)."""
        return dict(self._call(self._redis.info, section))

    def read_option(self, name: str) -> str | None:
        """Read an option of the server's configuration; None where it does not tell, as many managed servers.

        A user without CONFIG reads what its administrator's `forage redis load` has left.
        """
        try:
            value: str | None = self._call(self._redis.config_get, name).get(name)
        except (SettingsError, redis.ResponseError):
            return self._read_fact(name)
        return value

    def _read_fact(self, option: str) -> str | None:
        try:
            return bytes(self._redis.fcall_ro(f"{FACTS}_{option}", 0)).decode()
        except redis.ResponseError:  # nobody has left it
            return None

    def _run(self, script: str, keys: Sequence[str], *arguments: Any) -> Any:
        call = self._redis.fcall_ro if is_read_only(script) else self._redis.fcall
        try:
            return self._call(call, name_function(script), len(keys), *keys, *arguments)
        except redis.ResponseError as error:
            if "FENCED" not in str(error):
                raise
            raise _make_fenced_error(int(str(error).split()[-1])) from None

    def _run_fenced(self, script: str, keys: Sequence[str], *arguments: Any) -> Any:
        return self._run(script, [self.key("epoch"), *keys], self.epoch, *arguments)

    def _run_unless_replaced(self, script: str, keys: Sequence[str], *arguments: Any) -> Any:
        """Run a script of trainers and workers; only a trainer has an epoch, by which it can be fenced off."""
        if self.epoch:
            keys, arguments = [*keys, self.key("epoch")], (*arguments, self.epoch)
        return self._run(script, keys, *arguments)

    def _to_block_ms(self, block_s: float) -> int | None:
        # Below the socket's timeout: else an idle wait looks like a dead server.
        return int(min(block_s, self._settings.timeout_s / 2) * 1000) or None

    def _call(self, command: Any, *args: Any, **kwargs: Any) -> Any:
        for repeated in itertools.count():  # not a deadline: this process may have stood still for long
            try:
                return command(*args, **kwargs)
            except redis.RedisError as error:
                # A server that lost its data (no append-only file) has lost the consumer groups too: create them.
                if "NOGROUP" in str(error) and repeated < 10 * self._settings.timeout_s:
                    self.create_groups(*{self.prompts, self.trajectories, *_NO_GROUP.findall(str(error))})
                    time.sleep(0.1)  # wait: has a time limit, and its caller names it
                    continue
                # Neither has a new server, or one of another version of Forage, the functions of this one.
                if _NO_FUNCTION in str(error) and repeated < 10 * self._settings.timeout_s:
                    self._load_functions()
                    time.sleep(0.1)  # wait: has a time limit; it may lose them again
                    continue
                typed = translate_error(error, name_server(self._settings), self._read_memory_limit)
                if typed is None:
                    raise
                raise typed from error

    def _load_functions(self) -> None:
        where = name_server(self._settings)
        try:
            load_functions(self._redis, where)
        except redis.RedisError as error:
            raise translate_error(error, where, self._read_memory_limit) or error from error

    def _read_memory_limit(self) -> int:
        return int(self.read_server("memory")["maxmemory"])


def _make_fenced_error(latest: int) -> FencedError:
    return FencedError(f"a later trainer has taken over this run (epoch {latest}): this one must end")
