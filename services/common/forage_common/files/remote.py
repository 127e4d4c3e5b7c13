"""Files at an address of fsspec, which a setting names."""

from __future__ import annotations

from typing import Any

from forage_common.errors import SettingsError
from forage_common.text.redaction import redact_text, redact_url


def open_file_system(url: str, setting: str, environment: str = "") -> tuple[Any, str]:
    """The file system of the URL of a setting, and the folder's path in it.

    Args:
        environment: whose packages decide which addresses can be read, such as "the trainer's"; empty: not said.

    Raises:
        SettingsError: no installed file system has such addresses.
    """
    from fsspec.core import url_to_fs  # in the environments of trainer and rollout service alone

    try:
        system, root = url_to_fs(url)
    except (ImportError, ValueError) as error:
        into = f" into {environment} environment" if environment else ""
        raise SettingsError(
            f"{setting} = '{redact_url(url)}' cannot be used ({redact_text(str(error))}): install what fsspec needs "
            f"for it{into}, or give another address"
        ) from None
    return system, str(root)
