"""`<run folder>/settings.yaml`, where no command has written it: in containers and on clusters."""

from __future__ import annotations

from forage_runtime.errors import DiskFullError
from forage_runtime.files.folders import write_text
from forage_runtime.settings import Settings
from forage_runtime.telemetry.logs import get_logger

_HEAD = "# The settings that the trainer was started with, without credentials.\n"


def write_settings(settings: Settings) -> None:
    """Write the settings for those who read the run; a file of `forage demo` or `forage up` stays as it is.

    Those commands start the trainer from their file. A folder that cannot be written is only logged: the run itself
    finds out whether it can go on.
    """
    path = settings.run.folder / "settings.yaml"
    try:
        if path.exists() and not path.read_text(encoding="utf-8").startswith(_HEAD):
            return
        write_text(path, _HEAD + settings.to_yaml(redacted=True))
    except (OSError, ValueError, DiskFullError) as error:
        get_logger().warning("settings_not_written", file=str(path), reason=str(error))
