"""The gRPC wire of a real reward service: certificates, tokens, their rotation, and who is turned away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from certificates import Issuer
from few_attempts import few_attempts
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import REGISTRY
from reward_wire import ITEM, NEXT, NO_TLS, TOKEN, WRONG, Wire, tls_of, write_tokens
from waiting import wait_until_async

from forage_proto.v1 import reward_pb2, reward_pb2_grpc, trajectory_pb2
from forage_reward.serve import server
from forage_reward.serve.server import Server
from forage_runtime.clients.reward import RewardClient
from forage_runtime.errors import SettingsError, UnavailableError
from forage_runtime.security import byte_budget, channels, refusals
from forage_runtime.security.channels import open_channel
from forage_runtime.security.token_file import authorization_metadata
from forage_runtime.settings import RolloutSettings, TlsSettings

__all__ = ["few_attempts"]


@pytest.fixture
def serve(free_address: Callable[[], str]) -> Iterator[Callable[..., Wire]]:
    servers: list[Server] = []

    def start(tls: TlsSettings = NO_TLS, token_file: Path | None = None) -> Wire:
        wire = Wire(free_address(), token_file)
        servers.append(Server(wire.make_settings(tls, token_file)).listen())
        return wire

    yield start
    for one in servers:
        one.drain(0)


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    return Issuer(tmp_path / "authority")


def count(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


@contextmanager
def counted(name: str, by: float, **labels: str) -> Iterator[None]:
    before = count(name, **labels)
    yield
    assert count(name, **labels) == before + by


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_client_verifies_the_service_by_the_name_that_it_calls(
    serve: Callable[..., Wire], issuer: Issuer, host: str
) -> None:
    wire = serve(tls_of(issuer, issuer.issue("reward")))
    with counted("forage_common_grpc_handshakes_total", 1, wire="reward/grpc"):
        named = Wire(wire.address.replace("127.0.0.1", host), None)
        assert named.score(tls_of(issuer)) == 1.0


@pytest.mark.usefixtures("few_attempts")
@pytest.mark.parametrize(
    ("issue", "reason", "sentence"),
    [
        (lambda own, other: own.issue_expired("reward"), "expired", "the service's certificate has expired: renew"),
        (lambda own, other: own.issue_early("reward"), "not_yet_valid", "is not valid yet: check its dates"),
        (lambda own, other: own.issue("reward", hosts=("elsewhere",)), "other_name", "is not for this address"),
        (lambda own, other: other.issue("reward"), "other_authority", "is of an authority that tls.ca does not hold"),
    ],
    ids=["expired", "not yet valid", "wrong name", "wrong authority"],
)
def test_a_certificate_that_does_not_fit_is_named_counted_and_logged(
    serve: Callable[..., Wire], tmp_path: Path, issuer: Issuer, issue: Any, reason: str, sentence: str
) -> None:
    wire = serve(tls_of(issuer, issue(issuer, Issuer(tmp_path / "other"))))
    before = count("forage_common_handshake_failures_total", service="reward", reason=reason)
    with structlog.testing.capture_logs() as logs, pytest.raises(UnavailableError, match=sentence):
        wire.score(tls_of(issuer))
    assert count("forage_common_handshake_failures_total", service="reward", reason=reason) > before
    (line, *_) = [log for log in logs if log["event"] == "handshake_failed"]
    assert (line["reason"], line["address"], sentence in line["detail"]) == (reason, wire.address, True)


@pytest.mark.usefixtures("few_attempts")
def test_tls_and_plain_text_do_not_meet(serve: Callable[..., Wire], issuer: Issuer) -> None:
    secure, plain = serve(tls_of(issuer, issuer.issue("reward"))), serve()
    with pytest.raises(UnavailableError, match=r"it may speak TLS \(set tls\.ca here\)"):
        secure.score(NO_TLS)
    with pytest.raises(UnavailableError, match=r"answers in plain text: set tls\.ca, tls\.cert and tls\.key there"):
        plain.score(tls_of(issuer))


@pytest.mark.usefixtures("few_attempts")
def test_mutual_tls_lets_in_only_who_has_a_valid_certificate_of_the_authority(
    serve: Callable[..., Wire], tmp_path: Path, issuer: Issuer
) -> None:
    wire = serve(tls_of(issuer, issuer.issue("reward"), require_client_cert=True))
    assert wire.score(tls_of(issuer, issuer.issue("rollout"))) == 1.0
    foreign = Issuer(tmp_path / "other").issue("rollout")
    for tls in (
        tls_of(issuer),
        tls_of(issuer, issuer.issue_expired("late")),
        TlsSettings(ca=issuer.ca, cert=foreign.cert, key=foreign.key),
    ):
        with pytest.raises(UnavailableError, match=r"refuse this client's certificate \(tls\.cert, tls\.key\)"):
            wire.score(tls)


def test_a_service_without_a_certificate_says_so_at_its_start(serve: Callable[..., Wire], issuer: Issuer) -> None:
    with pytest.raises(SettingsError, match=r"the reward has no certificate: set tls\.cert and tls\.key"):
        serve(tls_of(issuer))


@pytest.mark.parametrize(("sent", "reason"), [((), "no_token"), ((WRONG,), "wrong_token")])
def test_who_sends_no_or_another_token_is_refused_counted_and_logged_without_it(
    serve: Callable[..., Wire], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: tuple[str, ...], reason: str
) -> None:
    monkeypatch.setattr(refusals, "_limit", refusals._LogLimit())
    wire = serve(token_file=write_tokens(tmp_path / "tokens", TOKEN))
    own = write_tokens(tmp_path / "own", *sent) if sent else None
    with (
        structlog.testing.capture_logs() as logs,
        counted("forage_common_refused_callers_total", 1, wire="reward/grpc", reason=reason),
        pytest.raises(SettingsError, match=r"asks for a token.*: set reward\.auth_token_file") as refused,
    ):
        wire.score(token_file=own)
    (line,) = [log for log in logs if log["event"] == "caller_refused"]
    assert (line["wire"], line["reason"]) == ("reward/grpc", reason)
    assert line["peer"].startswith("ipv4:127.0.0.1:")
    for secret in (TOKEN, WRONG):
        assert secret not in json.dumps(logs) + str(refused.value)


METHODS: dict[str, Callable[[grpc.Channel, Any], Any]] = {
    "Score": lambda channel, metadata: reward_pb2_grpc.RewardStub(channel).Score(
        reward_pb2.ScoreRequest(items=[ITEM]), metadata=metadata
    ),
    "Describe": lambda channel, metadata: reward_pb2_grpc.RewardStub(channel).Describe(
        reward_pb2.DescribeRequest(), metadata=metadata
    ),
    "ScoreStream": lambda channel, metadata: list(
        reward_pb2_grpc.RewardStub(channel).ScoreStream(
            iter([reward_pb2.ScoreStreamRequest(item=ITEM)]), metadata=metadata
        )
    ),
    "reflection": lambda channel, metadata: list(
        reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), metadata=metadata
        )
    ),
    "a large request": lambda channel, metadata: reward_pb2_grpc.RewardStub(channel).Score(
        reward_pb2.ScoreRequest(items=[reward_pb2.ScoreItem(spans=[trajectory_pb2.Span(text="x" * 2**24)])]),
        metadata=metadata,
    ),
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_asks_for_the_token_and_takes_it(serve: Callable[..., Wire], tmp_path: Path, method: str) -> None:
    file = write_tokens(tmp_path / "tokens", TOKEN)
    with grpc.insecure_channel(serve(token_file=file).address) as channel:
        for metadata in ((), (("authorization", f"Bearer {WRONG}"),), (("authorization", TOKEN),)):
            with pytest.raises(grpc.RpcError) as refused:
                METHODS[method](channel, metadata)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert METHODS[method](channel, authorization_metadata(file))


async def test_health_checks_need_no_token(serve: Callable[..., Wire], tmp_path: Path) -> None:
    wire = serve(token_file=write_tokens(tmp_path / "tokens", TOKEN))
    async with open_channel(wire.address, NO_TLS) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=300)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


class Callers:
    """Call a service without pause until the block ends. No call may fail, and none is repeated."""

    def __init__(self, client: RewardClient) -> None:
        self._client = client
        self._scores = 0
        self._ended = asyncio.Event()

    async def _score(self) -> None:
        while not self._ended.is_set():
            await self._client._stub.Score(reward_pb2.ScoreRequest(items=[ITEM]), timeout=300)
            self._scores += 1

    async def pause(self) -> None:
        """Wait until each has begun a further call, and had its answer."""
        target = self._scores + 3 * len(self._tasks)
        await wait_until_async(lambda: self._scores >= target or any(task.done() for task in self._tasks))

    async def __aenter__(self) -> Callers:
        self._tasks = [asyncio.create_task(self._score()) for _ in range(4)]
        await self.pause()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ended.set()
        await asyncio.gather(*self._tasks)


async def test_no_call_fails_while_a_token_is_replaced(serve: Callable[..., Wire], tmp_path: Path) -> None:
    theirs, ours = write_tokens(tmp_path / "theirs", TOKEN), write_tokens(tmp_path / "ours", TOKEN)
    wire = serve(token_file=theirs)
    client = RewardClient(wire.make_settings(token_file=ours))

    async with Callers(client) as callers:
        # The files of two machines never change at the same moment: accept the new one, send it, drop the old one.
        for file, tokens in ((theirs, (TOKEN, NEXT)), (ours, (NEXT,)), (theirs, (NEXT,))):
            write_tokens(file, *tokens)
            await callers.pause()
    await client.close()
    late = RewardClient(wire.make_settings(token_file=write_tokens(tmp_path / "late", TOKEN)))
    with pytest.raises(SettingsError, match="does not know the one sent"):
        await late.score([ITEM])
    await late.close()


@pytest.mark.usefixtures("few_attempts")
async def test_no_call_fails_while_certificates_and_authority_are_replaced(
    serve: Callable[..., Wire], tmp_path: Path, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "LOOK_INTERVAL_S", 0.0)
    later = Issuer(tmp_path / "later")
    both = issuer.ca.read_bytes() + later.ca.read_bytes()
    server, caller = issuer.issue("reward"), issuer.issue("rollout")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(issuer.ca.read_bytes())
    tls = {"ca": trusted, "require_client_cert": True}
    wire = serve(TlsSettings(cert=server.cert, key=server.key, **tls))
    client = RewardClient(wire.make_settings(TlsSettings(cert=caller.cert, key=caller.key, **tls)))

    def replace(name: str) -> None:
        fresh = later.issue(name)
        for suffix in ("key", "pem"):
            (later.folder / f"{name}.{suffix}").replace(issuer.folder / f"{name}.{suffix}")
        assert not fresh.cert.exists()

    with structlog.testing.capture_logs() as logs:
        async with Callers(client) as callers:
            # Trust both authorities, show certificates of the new one, trust it alone.
            for step in (
                lambda: trusted.write_bytes(both),
                lambda: replace("reward"),
                lambda: replace("rollout"),
                lambda: trusted.write_bytes(later.ca.read_bytes()),
            ):
                step()
                await callers.pause()
    await client.close()
    assert {log["event"] for log in logs} >= {"certificates_reloaded"}
    keys = [line for line in (issuer.folder / "reward.key").read_text().splitlines() if "KEY" not in line]
    assert not any(line in json.dumps(logs) for line in keys)
    new, stranger = later.issue("new"), issuer.issue("stranger")
    assert await asyncio.to_thread(wire.score, TlsSettings(cert=new.cert, key=new.key, ca=trusted)) == 1.0
    with pytest.raises(UnavailableError, match="refuse this client's certificate"):
        await asyncio.to_thread(wire.score, TlsSettings(cert=stranger.cert, key=stranger.key, ca=trusted))


async def test_requests_that_do_not_arrive_fill_the_room_and_health_checks_have_their_own(
    serve: Callable[..., Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_BYTES_IN_PROGRESS", 2 * server.MAX_MESSAGE_BYTES)
    monkeypatch.setattr(byte_budget.RequestByteBudget.take, "__defaults__", (0.3,))
    monkeypatch.setattr(byte_budget, "READ_S", 300.0)
    wire = serve()
    scored = asyncio.Event()

    async def send_late() -> Any:
        await scored.wait()
        yield b""

    async def is_refused(stub: reward_pb2_grpc.RewardStub) -> bool:
        try:
            await stub.Score(reward_pb2.ScoreRequest(items=[ITEM]), timeout=300)
        except grpc.RpcError:
            return True
        return False

    async with open_channel(wire.address, NO_TLS) as channel:
        call = channel.stream_unary("/forage.v1.Reward/Score")
        stalled = [call(send_late()) for _ in range(2)]
        stub = reward_pb2_grpc.RewardStub(channel)
        while not await is_refused(stub):  # they may not have arrived
            pass
        before = count("forage_common_requests_shed_total", wire="reward/grpc")
        with pytest.raises(grpc.RpcError, match="requests of 64 MiB are in progress, the limit is 64 MiB"):
            await stub.Score(reward_pb2.ScoreRequest(items=[ITEM]), timeout=300)
        assert count("forage_common_requests_shed_total", wire="reward/grpc") == before + 1
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=300)
        scored.set()
        assert [await one.code() for one in stalled] == [grpc.StatusCode.OK] * 2
        scored.clear()
        monkeypatch.setattr(byte_budget, "READ_S", 0.3)
        assert await call(send_late()).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        reply = await stub.Score(reward_pb2.ScoreRequest(items=[ITEM]), timeout=300)
        assert reply.items[0].score.total == 1.0
        scored.set()


async def test_a_batch_of_many_long_trajectories_is_scored_in_order(serve: Callable[..., Wire]) -> None:
    items = []
    for number in range(2000):
        items.append(reward_pb2.ScoreItem())
        items[-1].CopyFrom(ITEM)
        items[-1].trajectory_id = f"t{number}"
        items[-1].spans[0].text = "where " * 4000
    settings = serve().make_settings()
    client = RewardClient(settings.model_copy(update={"rollout": RolloutSettings(score_timeout_s=60.0)}))
    scored = await client.score(items)  # 48 MB
    await client.close()
    assert [one.trajectory_id for one in scored] == [item.trajectory_id for item in items]
    assert {one.score.total for one in scored} == {1.0}
