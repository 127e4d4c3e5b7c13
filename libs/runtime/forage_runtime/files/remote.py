"""Files at an address of fsspec: a path, s3://, gs://, …"""

from __future__ import annotations

from typing import Any

from forage_runtime.errors import ForageError, SettingsError
from forage_runtime.text.redaction import redact_text, redact_url


class UnknownAddressError(ForageError):
    """No installed file system has such addresses. The sentence says why, and holds no credentials."""


class StorageError(ForageError):
    """An address cannot be read or written. The sentence does not hold the address's credentials."""

    def __init__(self, sentence: str) -> None:
        super().__init__(redact_text(sentence))


def open_address(url: str) -> tuple[Any, str]:
    """The file system of a path or URL, and the folder's path in it.

    Raises:
        UnknownAddressError: see there.
    """
    from fsspec.core import url_to_fs  # in the environments of trainer, rollout service, retriever and console alone

    try:
        system, root = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UnknownAddressError(redact_text(" ".join(str(error).split()))) from None
    return system, str(root)


def open_file_system(url: str, setting: str, environment: str) -> tuple[Any, str]:
    """As `open_address`, for the URL of a setting.

    Args:
        environment: whose packages decide which addresses can be read, such as "the trainer's environment".

    Raises:
        SettingsError: no installed file system has such addresses.
    """
    try:
        return open_address(url)
    except UnknownAddressError as error:
        raise SettingsError(
            f"{setting} = '{redact_url(url)}' cannot be used ({error}): install what fsspec needs for it into "
            f"{environment}, or give another address"
        ) from None
