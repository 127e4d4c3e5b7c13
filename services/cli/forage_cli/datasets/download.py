"""A file from the web, whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

import httpx

from forage_common.errors import DataError
from forage_common.files import durable

_TIMEOUT_S = 30.0


def is_offline() -> bool:
    """Whether the user has forbidden downloads, as Hugging Face's own tools understand it."""
    return os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")


def download(url: str, file: Path, remedy: str) -> None:
    """Write what is at `url` to `file`, whose folder is made where it is missing.

    Args:
        remedy: what a user who cannot reach it may do instead; ends the error's sentence.

    Raises:
        DataError: downloads are forbidden, or the address does not give the file.
    """
    if is_offline():
        raise DataError(f"{url} is not downloaded, because HF_HUB_OFFLINE is set: {remedy}")
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f"{durable.PARTIAL_PREFIX}{file.name}")
    try:
        with httpx.stream("GET", url, follow_redirects=True, timeout=_TIMEOUT_S) as reply, aside.open("wb") as out:
            reply.raise_for_status()
            for part in reply.iter_bytes():
                out.write(part)
    except httpx.HTTPStatusError as error:
        aside.unlink()
        raise DataError(f"{url} answers {error.response.status_code}: {remedy}") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        aside.unlink(missing_ok=True)
        raise DataError(f"{url} cannot be reached ({' '.join(str(error).split())}): {remedy}") from None
    durable.sync(aside)
    aside.replace(file)
    durable.sync(file.parent)
