"""YAML by the core schema of YAML 1.2: PyYAML alone reads `1e-3` as a text, `on` as true and `012` as ten."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml

_BOOL, _INT, _FLOAT, _NULL = (f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float", "null"))
_RULES: tuple[tuple[str, str, str], ...] = (
    (_BOOL, r"true|True|TRUE|false|False|FALSE", "tTfF"),
    (_INT, r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        _FLOAT,
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    (_NULL, r"~|null|Null|NULL|", "~nN"),
    ("tag:yaml.org,2002:merge", r"<<", "<"),
)
"""Tag, what is read as it, and the first characters of that; the first rule that fits holds."""


class CoreLoader(yaml.SafeLoader):
    """Reads by the core schema, and merges `<<`.

    Refuses a key that stands twice: YAML forbids it, and the value that came first would silently be lost.
    """

    # Not those of YAML 1.1; PyYAML keeps them on the class, which its types do not say.
    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}  # type: ignore[misc]

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of a node; an error names the key that stands twice, and its line."""
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value[:80]!r} stands twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_core_int(self, node: yaml.ScalarNode) -> int:
        """A whole number: a leading zero means nothing, `0o` octal and `0x` hexadecimal."""
        text = self.construct_scalar(node)
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        return int(text[2:] if base != 10 else text, base)


class TextLoader(CoreLoader):
    """Reads the same tree with every scalar as the text that stands there."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}  # type: ignore[misc]


class CoreDumper(yaml.SafeDumper):
    """Quotes each text that readers of YAML 1.1 or 1.2 would take for something else."""


for _tag, _pattern, _first in _RULES:
    _whole, _starts = re.compile(f"(?:{_pattern})\\Z"), [*_first, *([""] if _tag == _NULL else [])]
    CoreLoader.add_implicit_resolver(_tag, _whole, _starts)
    CoreDumper.add_implicit_resolver(_tag, _whole, _starts)
TextLoader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"<<\Z"), ["<"])
CoreLoader.add_constructor(_INT, CoreLoader.construct_core_int)
