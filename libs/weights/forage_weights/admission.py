"""Which announced policies an engine may read at all: from where, and signed by whom. Asked before anything is read."""

from __future__ import annotations

import re
from typing import Any

from google.protobuf import json_format

from forage_proto.v1.trajectory_pb2 import Policy
from forage_runtime.addresses import split_address
from forage_runtime.security.signatures import Purpose, RunSignatures, SignatureError
from forage_runtime.settings import Settings
from forage_weights.allowed_addresses import AddressError, AllowedAddresses
from forage_weights.announcement import PolicyError, check_files, describe_policy, list_files

_HOST = re.compile(r"[A-Za-z0-9._:-]{1,253}", re.ASCII)


class Admission:
    """Checks the announcements of one run, which come from Redis and from `UpdateWeights`.

    Raises:
        SettingsError: a key file is wrong.
    """

    def __init__(self, settings: Settings) -> None:
        run, uri = settings.run, settings.trainer.publish.uri
        published = [f"{uri.rstrip('/')}/{run.id}"] if uri else []
        self._addresses = AllowedAddresses(
            [run.folder, *published, settings.model.path, *settings.security.allowed_addresses]
        )
        self._sender = split_address(settings.trainer.publish.direct_address or ":0")[0]
        self._signatures = RunSignatures.verifying(settings.security, run.id)
        self._newest = 0, 0
        """(epoch, version) of the newest signed policy that was admitted."""

    def check(self, policy: Policy) -> None:
        """Return if a policy may be read.

        Where signatures are required, none older than one that was admitted is: what Redis says may be an announcement
        of before. The trainer never goes back: after a rollback its version is lower, and its epoch higher.

        Raises:
            PolicyError: it may not; the sentence says what is wrong, and what allows it.
        """
        name = describe_policy(policy)
        try:
            self._check_addresses(policy)
            key = self._signatures.require(Purpose.ANNOUNCEMENT, describe_announcement(policy), policy.signature, name)
        except (AddressError, SignatureError) as error:
            raise PolicyError(f"{name} is refused: {error}") from None
        if not (key and self._signatures.is_required):
            return
        order = policy.epoch, policy.version
        if order < self._newest:
            raise PolicyError(
                f"{name} is refused: it is older than version {self._newest[1]} of epoch {self._newest[0]}, which was "
                "announced before: where the run was begun anew, start the engines again"
            )
        self._newest = order

    def _check_addresses(self, policy: Policy) -> None:
        if policy.parts:
            self._addresses.require(policy.uri)
            for part in policy.parts:
                self._addresses.require(part.uri, check_files(policy, part.files))
        else:
            self._addresses.require(policy.uri, list_files(policy))
        if policy.HasField("direct"):
            sender = policy.direct
            if not (_HOST.fullmatch(sender.host) and 0 < sender.port < 2**16):
                raise AddressError(f"the sender {sender.host[:200]!r}, port {sender.port}, is no address")
            if self._sender not in ("", sender.host):
                raise AddressError(f"the sender {sender.host} is not allowed: it is not trainer.publish.direct_address")


def describe_announcement(policy: Policy) -> dict[str, Any]:
    """Everything that an announcement says but its signature, as plain JSON data."""
    described: dict[str, Any] = json_format.MessageToDict(policy, preserving_proto_field_name=True)
    described.pop("signature", None)
    return described


def sign_announcement(policy: Policy, signatures: RunSignatures) -> None:
    """Sign a policy that is complete and about to be announced; nothing happens without a key."""
    policy.signature = signatures.sign(Purpose.ANNOUNCEMENT, describe_announcement(policy))
