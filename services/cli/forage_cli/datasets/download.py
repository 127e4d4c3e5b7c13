"""Downloads: a file is complete or absent."""

from __future__ import annotations

import os
from pathlib import Path

import httpx

from forage_common.errors import DataError
from forage_common.files import durable

_TIMEOUT_S = 30.0


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids downloads, as in Hugging Face's tools."""
    return os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")


def download(url: str, file: Path, remedy: str) -> None:
    """Download `url` to `file`; creates its folder.

    Args:
        remedy: advice that ends the error's sentence.

    Raises:
        DataError: downloads are forbidden, or the download failed.
    """
    if is_offline():
        raise DataError(f"{url} is not downloaded, because HF_HUB_OFFLINE is set: {remedy}")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with (
            httpx.stream("GET", url, follow_redirects=True, timeout=_TIMEOUT_S) as reply,
            durable.stage_file(file) as partial,
            partial.open("wb") as out,
        ):
            reply.raise_for_status()
            for part in reply.iter_bytes():
                out.write(part)
    except httpx.HTTPStatusError as error:
        raise DataError(f"{url} answers {error.response.status_code}: {remedy}") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DataError(f"{url} cannot be reached ({' '.join(str(error).split())}): {remedy}") from None
