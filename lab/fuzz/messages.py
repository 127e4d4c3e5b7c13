"""Protobuf messages with hostile values, from their descriptors, and bytes that are damaged or were never valid."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import hypothesis
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies

from fuzz.damage import ODD_INTEGERS, ODD_TEXTS, damage, make_wire_trick

_DEPTH = 4
_DOUBLES = (0.0, -0.0, 1.0, -1.0, 0.5, float("nan"), float("inf"), float("-inf"), 1e308, 5e-324)
_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_BATCH = 100


def draw(strategy: strategies.SearchStrategy[Any], count: int, seed: int) -> list[Any]:
    """Draw values from a strategy: as many as it has, at most `count`; the same for the same seed."""
    found: list[Any] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


def hostile(kind: type[Message]) -> strategies.SearchStrategy[Message]:
    """Messages of a kind, with values at the edges of their types and texts that are markup, paths or escapes."""

    @strategies.composite
    def build(draw_one: Any) -> Message:
        # One number seeds most choices: a draw for each field of each message would take most of the time.
        texts = draw_one(strategies.lists(strategies.text(max_size=40), max_size=4))
        return build_hostile(kind, random.Random(draw_one(strategies.integers(0, 2**64 - 1))), (*ODD_TEXTS, *texts))

    return build()


def build_hostile(
    kind: type[Message], chance: random.Random, texts: Sequence[str] = ODD_TEXTS, depth: int = _DEPTH
) -> Message:
    """A message with hostile values in more than half of its fields; the others are unset."""
    built = kind()
    for field in built.DESCRIPTOR.fields:
        if chance.random() < 0.4:
            continue
        if field.is_repeated:
            _fill_repeated(built, field, chance, texts, depth)
        elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            if depth:
                getattr(built, field.name).CopyFrom(
                    build_hostile(field.message_type._concrete_class, chance, texts, depth - 1)
                )
        else:
            setattr(built, field.name, _choose_value(field, chance, texts))
    return built


def generate_payloads(
    kind: type[Message], examples: Sequence[Message], seed: int, share_structured: float = 0.4
) -> Iterator[bytes]:
    """Wire bytes without end: hostile messages, damaged good ones, tricks of the wire format, good ones."""
    chance = random.Random(seed)
    good = [example.SerializeToString() for example in examples] or [b""]
    while True:
        structured = iter(draw(hostile(kind), int(_BATCH * share_structured), chance.getrandbits(32)))
        for _ in range(_BATCH):
            ready = next(structured, None) if chance.random() < share_structured else None
            if ready is not None:
                yield ready.SerializeToString()
                continue
            match chance.randrange(6):
                case 0:
                    yield make_wire_trick(chance)
                case 1:
                    yield chance.choice(good) + make_wire_trick(chance)
                case 2:
                    mixed = type(examples[0])() if examples else kind()
                    mixed.MergeFromString(chance.choice(good))
                    mixed.MergeFrom(build_hostile(type(mixed), chance, depth=2))
                    yield mixed.SerializeToString()
                case _:
                    yield damage(chance.choice(good), chance)


def _fill_repeated(
    built: Message, field: FieldDescriptor, chance: random.Random, texts: Sequence[str], depth: int
) -> None:
    count = chance.choice((0, 1, 1, 2, 3, 20))
    target = getattr(built, field.name)
    if field.cpp_type != FieldDescriptor.CPPTYPE_MESSAGE:
        target.extend(_choose_value(field, chance, texts) for _ in range(chance.choice((count, 300))))
    elif field.message_type.GetOptions().map_entry:
        if depth:
            for _ in range(count):
                entry = field.message_type.fields_by_name["value"]
                if entry.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
                    inner = build_hostile(entry.message_type._concrete_class, chance, texts, depth - 1)
                    target[chance.choice(texts)].CopyFrom(inner)
                else:
                    target[chance.choice(texts)] = _choose_value(entry, chance, texts)
    elif depth:
        for _ in range(count):
            target.add().CopyFrom(build_hostile(field.message_type._concrete_class, chance, texts, depth - 1))


def _choose_value(field: FieldDescriptor, chance: random.Random, texts: Sequence[str]) -> Any:
    kind = field.cpp_type
    if kind in _RANGES:
        low, high = _RANGES[kind]
        return max(low, min(high, chance.choice((chance.choice(ODD_INTEGERS), 2**64 - 1, chance.randint(0, 9)))))
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return chance.choice(_DOUBLES)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return chance.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        known = [value.number for value in field.enum_type.values]
        return chance.choice((*known, *known, 99, -1, 2**31 - 1))
    text = chance.choice(texts)
    return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
