"""Calls of gRPC: messages of every method of a service, of health and reflection, and bytes that are no call."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from fuzz.damage import damage
from fuzz.inputs import Input
from fuzz.messages import generate_payloads

HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
REFLECTION = {
    f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo": (True, True) for version in ("v1alpha",)
}
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS = b"\0\0\0\x04\0\0\0\0\0"
_HEADERS = b"\0\0\x05\x01\x04\0\0\0\x01\x82\x86\x84\x41\x8a"
_FRAMES = 5


@dataclass(frozen=True)
class GrpcSurface:
    """What a server of gRPC answers.

    Attributes:
        examples: name of a method → valid requests.
        left_out: methods that would stop the service for all other inputs.
    """

    wire: str
    service: ServiceDescriptor
    examples: Mapping[str, Sequence[Message]]
    has_reflection: bool = True
    left_out: Sequence[str] = ()

    @property
    def methods(self) -> dict[str, tuple[bool, bool]]:
        """Path of a method → (whether requests are a stream, whether replies are)."""
        found = {path: _get_kind(method) for path, method in self._list_methods()}
        return found | (REFLECTION if self.has_reflection else {})

    def _list_methods(self) -> list[tuple[str, MethodDescriptor]]:
        own = [method for method in self.service.methods if method.name not in self.left_out]
        return [(f"/{method.containing_service.full_name}/{method.name}", method) for method in own]

    def generate(self, seed: int) -> Iterator[Input]:
        """Inputs without end, the same for the same seed."""
        chance = random.Random(seed)
        methods = self._list_methods()
        payloads = {
            path: generate_payloads(
                message_factory.GetMessageClass(method.input_type),
                self.examples.get(method.name, ()),
                chance.getrandbits(32),
            )
            for path, method in methods
        }
        kinds = {path: _get_kind(method) for path, method in methods}
        probes = ["/grpc.health.v1.Health/Check", *(REFLECTION if self.has_reflection else ())]
        paths = list(payloads)
        while True:
            if chance.random() < 0.03:
                yield _make_bytes(self.wire, chance)
            elif chance.random() < 0.03:
                yield Input(self.wire, chance.choice(probes), (chance.randbytes(chance.choice((0, 1, 9, 200))),))
            else:
                path = chance.choice(paths)
                count = chance.choice((1, 1, 2, 5, 40)) if kinds[path][0] else 1
                yield Input(self.wire, path, tuple(next(payloads[path]) for _ in range(count)))


def list_all_methods(surface: GrpcSurface) -> dict[str, tuple[bool, bool]]:
    """The methods of a surface with those of its health service."""
    health = {f"/{HEALTH.full_name}/{method.name}": _get_kind(method) for method in HEALTH.methods}
    return surface.methods | health


def _get_kind(method: MethodDescriptor) -> tuple[bool, bool]:
    return bool(method.client_streaming), bool(method.server_streaming)


def _make_bytes(wire: str, chance: random.Random) -> Input:
    """Bytes on a port of gRPC: HTTP/1, TLS, HTTP/2 with frames that are wrong."""
    frames = b"".join(
        chance.randrange(2 ** chance.choice((3, 14, 24))).to_bytes(3, "big")
        + bytes((chance.randrange(12), chance.randrange(256)))
        + chance.choice((0, 1, 3, 2**31 - 1, 2**32 - 1)).to_bytes(4, "big")
        + chance.randbytes(chance.randrange(40))
        for _ in range(chance.randint(1, _FRAMES))
    )
    content = chance.choice((
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(200),
        _PREFACE + frames,
        _PREFACE + _SETTINGS + frames,
        damage(_PREFACE + _SETTINGS + _HEADERS + b"x" * 10, chance),
        chance.randbytes(chance.randint(1, 200)),
    ))  # fmt: skip
    return Input(wire, "tcp", (content,), complete=False)
