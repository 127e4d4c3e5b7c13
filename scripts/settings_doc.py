"""Generates docs/reference/settings.md from the settings models: `.venvs/cli/bin/python scripts/settings_doc.py`."""

from __future__ import annotations

from pathlib import Path

from forage_cli.settings_reference import SectionDescription, SettingDescription, describe_sections

DOCUMENT = Path(__file__).resolve().parents[1] / "docs/reference/settings.md"
_INTRODUCTION = """# Settings

This page lists every setting. How settings are loaded: [configure](../start/configure.md). The resolved values of
your file, and the description of one setting or section:

```
.venvs/cli/bin/forage config show -c configs/demo.yaml
.venvs/cli/bin/forage config explain trainer.max_staleness
```

`<name>` stands for a key of a map, for instance a data source; `<n>` for an item of a list. `null` means not set.

`make reference` generates this page.
"""


def render_page() -> str:
    """Render the page: a heading and a table per section."""
    return "\n".join([_INTRODUCTION, *map(_section, describe_sections())])


def _section(section: SectionDescription) -> str:
    rows = "\n".join(map(_row, section.settings))
    return f"""## `{section.name}`

{section.description}

| setting | type | default | unit | description |
|---|---|---|---|---|
{rows}
"""


def _row(setting: SettingDescription) -> str:
    default = f"`{setting.default}`" if setting.default else "required"
    key = setting.name.rpartition(".")[2]
    cells = [f"`{key}`", _escape(setting.type), default, setting.unit, _escape(setting.description)]
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    DOCUMENT.write_text(render_page(), encoding="utf-8")
