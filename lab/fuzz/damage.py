"""Damage to bytes: of any content, of JSON, and of protobuf's wire format."""

from __future__ import annotations

import json
import random
from typing import Any

ODD_TEXTS = (
    "", " ", "\0", "x" * 5_000, "é" * 99, "\u202e\u200b\ufeff", "\x1b[2J\x9b31m", "[/x] [bold]", "</answer>", "%s%n{0}",
    "../../etc/passwd", "..\\..\\x", "/dev/zero", "file:///etc/passwd", "http://127.0.0.1:1/", "a\r\nX: y", "'; --",
    "<script>", "NaN", "1e999", "-1", "null", "latest", "𝟙𝟚", "🦊" * 40, "ı İ ß", "a/b/c", ".", "..", "*", "?", "#",
)  # fmt: skip
ODD_INTEGERS = (0, 1, -1, 2, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, -(2**31), -(2**63))
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 1.5, -0.0, 1e308, 10**40, -(10**19), [], {}, [[]], [None], {"a": {"b": []}}, ["é", 3],
    "\ud800", *ODD_INTEGERS, *ODD_TEXTS,
)  # fmt: skip
_PIECES = (
    b"NaN", b"Infinity", b"-0", b"1e999", b"9" * 6_000, b'"\\ud800"', b'"\\u0000"', b"\xff\xfe", b"\0", b"[" * 50_000,
    b'{"a":' * 5_000, b"]", b"}", b",", b'"', b"\xed\xa0\x80", b"\xef\xbb\xbf", b"//", b"tru", b"\r\n\r\n", b"\n",
    b"\xff" * 16, b"\x80" * 11, b"\x7f\xff\xff\xff", b"PAR1", b"- &a [*a]\n", b"<<: *x\n",
)  # fmt: skip


def damage(content: bytes, chance: random.Random, times: int = 3) -> bytes:
    """Change a content at up to `times` places: pieces put in, cut, repeated, swapped, bits and bytes changed."""
    text = bytearray(content)
    for _ in range(chance.randint(1, times)):
        place = chance.randrange(len(text) + 1)
        match chance.randrange(8):
            case 0:
                text[place:place] = chance.choice(_PIECES)
            case 1:
                del text[place : place + chance.choice((1, 2, 8, 64, 1024))]
            case 2:
                text[place:place] = chance.randbytes(chance.randint(1, 8))
            case 3:
                del text[place:]
            case 4 if place < len(text):
                text[place] ^= 1 << chance.randrange(8)
            case 5 if place < len(text):
                text[place] = chance.choice((0, 1, 0x7F, 0x80, 0xFE, 0xFF))
            case 6:
                length = chance.choice((4, 32, 512))
                text[place:place] = text[place : place + length] * chance.choice((1, 2, 30))
            case _:
                begin = chance.randrange(len(text) + 1)
                text[place : place + 16] = text[begin : begin + 16]
    return bytes(text)


def damage_value(value: Any, chance: random.Random) -> Any:
    """Replace one value, anywhere in a tree of JSON, by an odd one; or add, remove or rename a key."""
    paths = list(_list_paths(value))
    *way, last = chance.choice(paths) or (None,)
    if last is None:
        return chance.choice(ODD_VALUES)
    changed = _copy(value)
    node = changed
    for key in way:
        node = node[key]
    match chance.randrange(6) if isinstance(node, dict) else 0:
        case 1:
            del node[last]
        case 2:
            node[chance.choice(ODD_TEXTS)] = node.pop(last)
        case 3:
            node[chance.choice(ODD_TEXTS)] = chance.choice(ODD_VALUES)
        case 4:
            node[last] = [node[last]] * chance.choice((2, 50))
        case _:
            node[last] = chance.choice(ODD_VALUES)
    return changed


def damage_json(value: Any, chance: random.Random) -> bytes:
    """A JSON text of a value with odd values in it; a third of them no JSON any more."""
    for _ in range(chance.choice((0, 1, 1, 2))):
        value = damage_value(value, chance)
    text = json.dumps(value, ensure_ascii=chance.random() < 0.5).encode(errors="surrogatepass")
    return damage(text, chance) if chance.random() < 0.33 else text


def write_varint(number: int) -> bytes:
    """A number as protobuf writes it."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def make_wire_trick(chance: random.Random) -> bytes:
    """Bytes that a parser of protobuf may stumble over: depth, lengths, groups, numbers of fields, endless numbers."""
    field = chance.choice((1, 2, 3, 4, 6, 15, 16, 2**29 - 1))
    match chance.randrange(8):
        case 0:  # a message in a message in …
            content = b""
            for _ in range(chance.choice((10, 99, 101, 500))):
                content = write_varint(field << 3 | 2) + write_varint(len(content)) + content
            return content
        case 1:
            return write_varint(field << 3 | 2) + write_varint(chance.choice((2**31 - 1, 2**31, 2**32, 2**63))) + b"x"
        case 2:
            return write_varint(field << 3 | 3) * chance.choice((1, 99, 5_000))  # groups that do not end
        case 3:
            return write_varint(field << 3 | 4)
        case 4:
            return b"\xff" * chance.choice((1, 9, 10, 11, 1_000))
        case 5:
            return b"\0" * chance.choice((1, 2, 1_000))
        case 6:
            return (write_varint(field << 3 | 2) + b"\0") * chance.choice((2, 10_000))
        case _:
            return chance.randbytes(chance.choice((0, 1, 10, 1_000)))


def _list_paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    if isinstance(value, dict):
        for key, inner in value.items():
            found += _list_paths(inner, (*path, key))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            found += _list_paths(inner, (*path, place))
    return found


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(inner) for key, inner in value.items()}
    return [_copy(inner) for inner in value] if isinstance(value, list) else value
