"""Settings with some values changed, checked as a file's are."""

from __future__ import annotations

from collections.abc import Mapping

from forage_runtime.settings import Settings, check_settings


def apply_changes(settings: Settings, changes: Mapping[str, object]) -> Settings:
    """The settings with values by their dotted names.

    Raises:
        SettingsError: they contradict each other then.
    """
    tree = settings.model_dump()
    for name, value in changes.items():
        *sections, key = name.split(".")
        node = tree
        for section in sections:
            node = node[section]
        node[key] = value
    return check_settings(tree)
