"""Full-text search: an index of the words of trajectories in SQLite, and the same search without an index."""

from __future__ import annotations

import contextlib
import re
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forage_console.store.files import DataFile
from forage_console.store.values import read_texts
from forage_runtime.telemetry.logs import get_logger

_FORMAT = 2
_STALE = 0.5
"""The index is made anew when more than this share of its files is gone."""
_BUSY_S = 30.0
_PAGE_BYTES = 16384
"""Of the file: with SQLite's 4096 the first search for a phrase takes twice as long to read."""
_CACHE_KIB = 1024
"""Of each thread's connection; the system keeps the file in memory."""
_WORD = re.compile(r"[^\W_]+")
_PART = re.compile(r'"([^"]*)"?|(\S+)')
_BEFORE, _AFTER = 60, 100
_TABLES = """
CREATE TABLE IF NOT EXISTS done(key INTEGER PRIMARY KEY);
CREATE VIRTUAL TABLE IF NOT EXISTS texts
  USING fts5(text, content='', columnsize=0, tokenize='unicode61 remove_diacritics 0');
"""


@dataclass(frozen=True)
class Phrase:
    """Words that follow each other. is_prefix: the last word may go on."""

    words: tuple[str, ...]
    is_prefix: bool = False


def parse_phrases(text: str) -> list[Phrase]:
    """Parse what a user types: words, "quoted phrases", and beginnings of words that end in *; all must be there."""
    found = []
    for quoted, word in _PART.findall(text):
        words = tuple(_WORD.findall((quoted or word).lower()))
        if words:
            found.append(Phrase(words, word.endswith("*")))
    return found


def make_pattern(phrases: Iterable[Phrase]) -> re.Pattern[str]:
    """Make the pattern that matches any of the phrases."""
    parts = []
    for phrase in phrases:
        words = r"[\W_]+".join(map(re.escape, phrase.words))
        parts.append(rf"(?<![^\W_]){words}" + ("" if phrase.is_prefix else r"(?![^\W_])"))
    return re.compile("|".join(parts), re.IGNORECASE)


def cut_snippet(text: str, phrases: Sequence[Phrase]) -> str | None:
    """Cut out the text around the first match; None without one."""
    match = make_pattern(phrases).search(text)
    if match is None:
        return None
    begin, end = max(0, match.start() - _BEFORE), min(len(text), match.end() + _AFTER)
    return ("…" if begin else "") + " ".join(text[begin:end].split()) + ("…" if end < len(text) else "")


def scan(file: DataFile, phrases: Sequence[Phrase]) -> list[int]:
    """Find the rows of a file that contain every phrase, by reading it.

    Raises:
        OSError, pyarrow.ArrowException, ValueError: it is gone or damaged.
    """
    patterns = [make_pattern([phrase]) for phrase in phrases]
    longest = max((word for phrase in phrases for word in phrase.words), key=len)
    found = []
    for rows in read_texts(file):
        for row, text in rows:
            if longest in text.lower() and all(pattern.search(text) for pattern in patterns):
                found.append(row)
    return found


class TextIndex:
    """Index of the texts of a run, in one file; several threads and processes may use it.

    Files are never removed from it: what it finds of files that are gone is left out by whoever asks.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.done: set[int] = set()
        try:
            self._open()
        except sqlite3.DatabaseError:
            self._start_over()

    def add(self, file: DataFile, stop: threading.Event) -> bool:
        """Add the texts of a file; False if it was stopped before the end.

        Raises:
            OSError, pyarrow.ArrowException, ValueError: the file is gone or damaged.
        """
        with contextlib.closing(self._connect()) as writer, writer:
            writer.execute("BEGIN IMMEDIATE")
            is_new = writer.execute("SELECT 1 FROM done WHERE key = ?", (file.key,)).fetchone() is None
            for rows in read_texts(file) if is_new else ():  # another process may have added it
                if stop.is_set():
                    writer.rollback()
                    return False
                entries = [(file.identify(row), text) for row, text in rows]
                writer.executemany("INSERT INTO texts(rowid, text) VALUES (?, ?)", entries)
            writer.execute("INSERT OR IGNORE INTO done VALUES (?)", (file.key,))
        with self._lock:
            self.done.add(file.key)
        return True

    def find(self, phrases: Sequence[Phrase]) -> np.ndarray:
        """Find the trajectories that contain every phrase, by their identity, also those of files that are gone."""
        query = " AND ".join(f'"{" ".join(one.words)}"' + ("*" if one.is_prefix else "") for one in phrases)
        with contextlib.closing(self._connect()) as reader:  # files that stay open for each thread and run add up
            rows = reader.execute("SELECT rowid FROM texts WHERE texts MATCH ?", (query,))
            found: np.ndarray = np.fromiter((identity for (identity,) in rows), dtype=np.int64)
            return found

    def is_stale(self, files: Sequence[DataFile]) -> bool:
        """Whether most of its files are gone."""
        known = self.done & {file.key for file in files}
        return len(self.done) > 10 and len(known) < len(self.done) * (1 - _STALE)

    def start_over(self) -> None:
        """Begin anew with an empty index."""
        with self._lock:
            self._start_over()

    def _open(self) -> None:
        with contextlib.closing(self._connect()) as connection, connection:
            if connection.execute("PRAGMA user_version").fetchone()[0] not in (0, _FORMAT):
                raise sqlite3.DatabaseError("another format")
            connection.execute(f"PRAGMA page_size={_PAGE_BYTES}")  # before anything is written
            connection.execute("PRAGMA journal_mode=WAL")
            connection.executescript(_TABLES)
            connection.execute(f"PRAGMA user_version={_FORMAT}")
            self.done = {key for (key,) in connection.execute("SELECT key FROM done")}

    def _start_over(self) -> None:
        get_logger().info("text_index_begins", file=str(self._path))
        self.done = set()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        for suffix in ("", "-wal", "-shm"):
            Path(f"{self._path}{suffix}").unlink(missing_ok=True)
        self._open()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=_BUSY_S, check_same_thread=False)
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
        return connection
