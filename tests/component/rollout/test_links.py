"""Connections between agents and engines, over real sockets."""

from __future__ import annotations

import asyncio
import signal
import struct

import pytest
import uvloop
from hypothesis import example, given, settings
from hypothesis import strategies as st
from linked_engine import KEY, CuttingWire, SamplingEngine, sample, serve, start_engine
from waiting import WAIT_S
from waiting import wait_until_async as wait_until

from forage_proto.v1.trajectory_pb2 import TemplateValues
from forage_rollout.links import link as link_module
from forage_rollout.links import pool as pool_module
from forage_rollout.links.connection import EngineError, FrameConnection, LinkLostError
from forage_rollout.links.frames import VERSION, Kind, pack_frame, pack_request
from forage_rollout.links.link import EngineAddress, EngineLink
from forage_rollout.links.pool import MAX_LOSSES, EnginePool
from forage_rollout.links.server import WIRE
from forage_rollout.loop.generation import Generation, GenerationRequest, RenderedPrompt
from forage_runtime.clients.calls import MalformedReplyError, RefusedError
from forage_runtime.errors import UnavailableError
from forage_runtime.security.refusals import REFUSED
from forage_runtime.text.chat_template import Chat
from forage_weights.rollout.policy import EngineLostError, NotServingError

ASKED = GenerationRequest([1, 2, 3], 4, 0.5, 0.9, 7, 11, ("</x>",), 2, "group", 5)


def ask(number: int, affinity: str = "group") -> GenerationRequest:
    return GenerationRequest([number, number + 1], 3, 1.0, 1.0, -1, number, affinity=affinity)


def make_pool(*addresses: EngineAddress, releases: bool = False) -> EnginePool:
    pool = EnginePool(releases)
    pool.set_replicas({f"replica-{number}": address for number, address in enumerate(addresses)})
    return pool


async def test_generations_chats_and_releases_reach_the_engine() -> None:
    engine = SamplingEngine()
    async with serve(engine) as (_, address):
        pool = make_pool(address, releases=True)
        done = await asyncio.gather(*(pool.generate(ask(number)) for number in range(50)))
        assert [one.token_ids for one in done] == [sample(ask(number)) for number in range(50)]
        assert done[0].versions == [(1, 2, 0, 3)]
        chat, values = [{"role": "user", "content": "four"}], TemplateValues(variables="{}", today="<think>ü")
        assert await pool.render_chat(chat, values) == RenderedPrompt([4], "<think>ü")
        await pool.release("group")
        await wait_until(lambda: engine.released == ["group"])
        assert pool.counts.generations_repeated == 0
        await pool.close()


def test_links_work_in_the_event_loop_of_ray() -> None:
    """It has transports of its own, and Ray's replicas run in it."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test_generations_chats_and_releases_reach_the_engine())


@pytest.mark.parametrize("error", [RefusedError("too long"), UnavailableError("busy"), MalformedReplyError("no JSON")])
async def test_errors_keep_their_type(error: Exception) -> None:
    async with serve(SamplingEngine(fails=error)) as (_, address):
        pool = make_pool(address)
        with pytest.raises(type(error), match=str(error)):
            await pool.generate(ASKED)
        with pytest.raises(ValueError, match="no such role"):
            await pool.render_chat([{"role": "?", "content": ""}])
        await pool.close()


async def test_a_bug_of_the_engine_is_an_error_and_no_reason_to_try_elsewhere() -> None:
    engine = SamplingEngine(fails=KeyError("bug"))
    async with serve(engine) as (_, address):
        pool = make_pool(address)
        with pytest.raises(EngineError, match="KeyError: 'bug'"):
            await pool.generate(ASKED)
        assert len(engine.asked) == 1
        await pool.close()


async def test_a_generation_or_chat_that_no_frame_can_hold_is_an_error_of_the_engine_and_no_wait_for_ever() -> None:
    class NegativeEngine(SamplingEngine):
        async def render_chat(self, messages: Chat, values: TemplateValues | None = None) -> RenderedPrompt:
            return RenderedPrompt([-1])

        async def generate(self, request: GenerationRequest) -> Generation:
            return Generation([-1], [-0.5], False, [(1, 2, 0, 1)])

    async with serve(NegativeEngine()) as (_, address), asyncio.timeout(WAIT_S):
        pool = make_pool(address)
        with pytest.raises(EngineError, match="OverflowError"):
            await pool.generate(ASKED)
        with pytest.raises(EngineError, match="OverflowError"):
            await pool.render_chat([{"role": "user", "content": ""}])
        await pool.close()


async def test_the_first_requests_have_the_choice_among_all_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_FIRST_S", WAIT_S)
    engines = [SamplingEngine(), SamplingEngine()]
    async with serve(engines[0]) as (_, one), serve(engines[1]) as (_, other):
        pool = make_pool(one, other, EngineAddress("127.0.0.1:1", KEY))
        await pool.wait_for_links()
        await asyncio.gather(*(pool.generate(ask(number, f"group {number}")) for number in range(20)))
        assert all(engine.asked for engine in engines)
        await pool.close()


async def test_an_agent_that_has_all_its_replies_knows_of_no_load() -> None:
    """They ended in one turn of the engine's event loop, as those of a batch do."""
    engine = SamplingEngine()
    engine.gate.clear()
    async with serve(engine) as (server, address):
        link = await EngineLink.connect(address)
        running = asyncio.gather(*(link.generate(ask(number)) for number in range(30)))
        await wait_until(lambda: len(engine.asked) == 30)
        engine.gate.set()
        await running
        assert (link.others, link.in_progress, server.in_progress) == (0, 0, 0)
        link.abort()


async def test_an_agent_without_the_key_is_turned_away_and_counted() -> None:
    before = REFUSED.labels(WIRE, "wrong_token")._value.get()
    async with serve(SamplingEngine()) as (server, address):
        with pytest.raises(LinkLostError):
            await EngineLink.connect(EngineAddress(address.host_port, b"w" * 32))
        assert not server.agents
    assert REFUSED.labels(WIRE, "wrong_token")._value.get() == before + 1


async def test_an_engine_without_the_key_gets_no_request() -> None:
    """It lets everyone in, and cannot prove that it is the replica."""

    class Impostor(FrameConnection):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self.send(Kind.CHALLENGE, VERSION, b"n" * 16)

        def take(self, kind: int, number: int, body: bytes) -> None:
            self.send(Kind.WELCOME, 0, body[16:])  # the agent's own proof

    listener = await asyncio.get_running_loop().create_server(Impostor, "127.0.0.1", 0)
    with pytest.raises(LinkLostError):
        await EngineLink.connect(EngineAddress(f"127.0.0.1:{listener.sockets[0].getsockname()[1]}", KEY))
    listener.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        pack_frame(Kind.GENERATE, 1, pack_request(ASKED)),
        struct.pack("<IBxxxI", 2**32 - 1, Kind.PROOF, 0),
        pack_frame(Kind.PROOF, 0, b"short"),
    ],
)
async def test_strangers_are_cut_off_and_never_reach_the_engine(sent: bytes) -> None:
    engine = SamplingEngine()
    async with serve(engine) as (server, address):
        host, _, port = address.host_port.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        async with asyncio.timeout(WAIT_S):
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(2**20)
        writer.close()
        await wait_until(lambda: not server.strangers)
        assert not engine.asked


async def test_a_request_that_is_given_up_is_not_sampled_on() -> None:
    engine = SamplingEngine()
    engine.gate.clear()
    async with serve(engine) as (server, address):
        pool = make_pool(address)
        running = asyncio.create_task(pool.generate(ASKED))
        await wait_until(lambda: len(engine.asked) == 1)
        running.cancel()
        await wait_until(lambda: server.in_progress == 0)
        assert (len(engine.asked), engine.finished) == (1, [])
        await pool.close()


async def test_what_an_agent_that_is_gone_has_asked_is_not_sampled_on() -> None:
    engine = SamplingEngine()
    engine.gate.clear()
    async with serve(engine) as (server, address):
        link = await EngineLink.connect(address)
        waiting = asyncio.create_task(link.generate(ASKED))
        await wait_until(lambda: server.in_progress == 1)
        link.abort()
        with pytest.raises(LinkLostError):
            await waiting
        await wait_until(lambda: server.in_progress == 0)
        assert not engine.finished


async def test_a_replica_that_leaves_ends_its_generations_and_gets_no_more() -> None:
    leaving, staying = SamplingEngine(), SamplingEngine()
    leaving.gate.clear()
    async with serve(leaving) as (server, address), serve(staying) as (_, other):
        pool = make_pool(address)
        running = [asyncio.create_task(pool.generate(ask(number))) for number in range(20)]
        await wait_until(lambda: len(leaving.asked) == 20)
        pool.set_replicas({"replica-0": address, "replica-1": other})
        await wait_until(lambda: pool.counts.engine_links == 2)
        end = asyncio.create_task(server.leave(WAIT_S))
        await wait_until(lambda: pool.counts.engine_links == 1)
        late = await asyncio.gather(*(pool.generate(ask(number)) for number in range(20, 30)))
        leaving.gate.set()
        done = [*await asyncio.gather(*running), *late]
        assert await end == 0
        await server.close()
        assert [one.token_ids for one in done] == [sample(ask(number)) for number in range(30)]
        assert (len(leaving.asked), len(staying.asked)) == (20, 10)
        assert pool.counts.generations_repeated == 0
        await pool.close()


async def test_a_replica_that_serve_no_longer_lists_may_answer_what_it_was_asked() -> None:
    first, second = SamplingEngine(), SamplingEngine()
    first.gate.clear()
    async with serve(first) as (server, address), serve(second) as (_, other):
        pool = make_pool(address)
        running = [asyncio.create_task(pool.generate(ask(number))) for number in range(5)]
        await wait_until(lambda: server.in_progress == 5)
        pool.set_replicas({"other": other})
        await pool.generate(ask(9))
        first.gate.set()
        await asyncio.gather(*running)
        await wait_until(lambda: not server.agents)
        assert (len(first.finished), len(second.finished)) == (5, 1)
        assert pool.counts.generations_repeated == 0
        await pool.close()


async def test_a_replica_out_of_service_is_avoided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "AVOID_S", 3600.0)
    engines = [SamplingEngine(fails=NotServingError("altered")), SamplingEngine()]
    async with serve(engines[0]) as (_, one), serve(engines[1]) as (_, two):
        pool = make_pool(one, two)
        await wait_until(lambda: pool.counts.engine_links == 2)
        for number in range(20):
            assert (await pool.generate(ask(number, f"group-{number}"))).token_ids
        assert len(engines[0].asked) == 1, "a replica that refused is left alone"
        assert pool.counts.generations_repeated == 0
        await pool.close()


async def test_generations_of_a_process_that_is_stopped_are_repeated_and_new_ones_go_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its kernel keeps the connections, and answers for it."""
    monkeypatch.setattr(link_module, "PING_S", 0.2)
    with start_engine() as (_, first), start_engine() as (frozen, second):
        pool = make_pool(first, second)
        await wait_until(lambda: pool.counts.engine_links == 2)
        running = asyncio.gather(*(pool.generate(ask(number, "")) for number in range(20)))
        await wait_until(lambda: pool._replicas["replica-1"].load)
        frozen.send_signal(signal.SIGSTOP)
        late = asyncio.gather(*(pool.generate(ask(number, f"group {number}")) for number in range(20)))
        async with asyncio.timeout(WAIT_S):
            assert all(one.token_ids for one in (*await running, *await late))
        assert pool.counts.generations_repeated > 0
        frozen.send_signal(signal.SIGCONT)
        await wait_until(lambda: pool.counts.engine_links == 2)
        await pool.close()


async def test_a_load_that_an_agent_has_heard_of_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "PING_S", 0.05)
    engines = [SamplingEngine(), SamplingEngine()]
    async with serve(engines[0]) as (server, one), serve(engines[1]) as (_, two):
        pool = make_pool(one, two)
        await wait_until(lambda: pool.counts.engine_links == 2)
        for _ in range(400):  # other agents'
            server.begin()
        await asyncio.gather(*(pool.generate(ask(number, "")) for number in range(20)))
        assert pool._replicas["replica-0"].load == 400
        for _ in range(400):
            server.end()
        await wait_until(lambda: pool._replicas["replica-0"].load == 0)
        before = len(engines[0].asked)
        await asyncio.gather(*(pool.generate(ask(number, f"group {number}")) for number in range(64)))
        assert len(engines[0].asked) > before
        await pool.close()


@pytest.mark.parametrize("releases", [True, False])
async def test_excess_load_of_a_group_goes_to_other_engines_unless_it_has_a_lease(releases: bool) -> None:
    engines = [SamplingEngine(), SamplingEngine()]
    for engine in engines:
        engine.gate.clear()
    async with serve(engines[0]) as (_, one), serve(engines[1]) as (_, two):
        pool = make_pool(one, two, releases=releases)
        await wait_until(lambda: pool.counts.engine_links == 2)
        running = asyncio.gather(*(pool.generate(ask(number)) for number in range(100)))
        await wait_until(lambda: sum(len(engine.asked) for engine in engines) == 100)
        least = min(len(engine.asked) for engine in engines)
        assert least == 0 if releases else least >= 30
        for engine in engines:
            engine.gate.set()
        await running
        await pool.release("group")
        assert not pool._homes
        await pool.close()


async def test_an_engine_that_stands_still_is_asked_only_where_there_is_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_module, "PING_S", 0.05)
    engines = [SamplingEngine(), SamplingEngine()]
    async with serve(engines[0]) as (server, one), serve(engines[1]) as (_, two):
        pool = make_pool(one, two)
        server.stands_still = lambda: True
        await wait_until(lambda: pool._replicas["replica-0"].stands_still and pool.counts.engine_links == 2)
        await asyncio.gather(*(pool.generate(ask(number, f"group {number}")) for number in range(20)))
        assert (len(engines[0].asked), len(engines[1].asked)) == (0, 20)
        pool.set_replicas({"replica-0": one})
        assert (await pool.generate(ASKED)).token_ids == sample(ASKED)
        await pool.close()


async def test_where_all_replicas_are_out_of_service_the_generation_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "AVOID_S", 0.02)
    engines = [SamplingEngine(fails=NotServingError("altered")) for _ in range(2)]
    async with serve(engines[0]) as (_, one), serve(engines[1]) as (_, two):
        pool = make_pool(one, two)
        waiting = asyncio.create_task(pool.generate(ask(99)))
        await wait_until(lambda: all(len(engine.asked) > 1 for engine in engines))
        assert not waiting.done()
        engines[0].fails = None
        assert (await waiting).token_ids == sample(ask(99))
        assert pool.counts.generations_repeated == 0
        await pool.close()


async def test_a_generation_waits_for_a_replica_to_come() -> None:
    pool = EnginePool(releases=False)
    waiting = asyncio.create_task(pool.generate(ASKED))
    await asyncio.sleep(0)
    async with serve(SamplingEngine()) as (_, address):
        pool.set_replicas({"one": address})
        assert (await waiting).token_ids == sample(ASKED)
        await pool.close()


async def test_a_generation_under_which_engines_die_one_after_the_other_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "AVOID_S", 0.02)
    pool_of = [SamplingEngine(fails=EngineLostError("dead")) for _ in range(MAX_LOSSES)]
    async with serve(pool_of[0]) as (_, a), serve(pool_of[1]) as (_, b), serve(pool_of[2]) as (_, c):
        pool = make_pool(a, b, c)
        with pytest.raises(UnavailableError, match=f"{MAX_LOSSES} engines were lost"):
            await pool.generate(ASKED)
        assert sum(len(engine.asked) for engine in pool_of) == pool.counts.generations_repeated == MAX_LOSSES
        await pool.close()


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 14), st.integers(0, 14)), max_size=3),
    st.lists(st.tuples(st.integers(0, 14), st.integers(0, 14)), max_size=3),
)
@example([(frames, 99) for frames in range(3)], [(99, frames) for frames in range(3)])
def test_every_generation_ends_once_wherever_connections_break(
    one: list[tuple[int, int]], other: list[tuple[int, int]]
) -> None:
    """Each is sampled to its end as often as its replies were lost and once more, and its tokens are those of one."""

    async def run() -> None:
        engines = [SamplingEngine(delay_s=0.001), SamplingEngine(delay_s=0.001)]
        async with serve(engines[0]) as (_, first), serve(engines[1]) as (_, second):
            wires = [CuttingWire(first.host_port, one), CuttingWire(second.host_port, other)]
            async with wires[0].open() as left, wires[1].open() as right:
                pool = make_pool(EngineAddress(left, KEY), EngineAddress(right, KEY))
                asked = [ask(number, f"group-{number % 3}") for number in range(12)]
                async with asyncio.timeout(WAIT_S):
                    done = await asyncio.gather(*map(pool.generate, asked))
                assert [generation.token_ids for generation in done] == [sample(request) for request in asked]
                finished = sum(len(engine.finished) for engine in engines)
                repeated = pool.counts.generations_repeated
                assert len(asked) <= finished <= len(asked) + repeated
                assert pool.counts.repeated_tokens <= 3 * min(repeated, len(asked))
                assert (repeated == 0) <= (pool.counts.repeated_tokens == 0)
                await pool.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_module, "_RETRY_S", 0.002)  # each attempt waits twice as long as the one before
        asyncio.run(run())
