"""Contract of every transport (pipeline/transport/messages.py), stated once for all."""

from __future__ import annotations

import anyio
import pytest

from pipeline.errors import LimitExceeded, PeerGone, TransportClosed, WireError
from pipeline.schema import SCHEMA_VERSION
from pipeline.transport.messages import EventKind, Kind, MessageFault, WireMessage
from tests.support.memory_transport import connected_peers

pytestmark = pytest.mark.timeout(20)


def numbered(n: int, size: int = 10) -> WireMessage:
    return WireMessage(Kind.TRAJECTORY, {"n": n}, (bytes([n % 256]) * size,))


async def answer(raw) -> list[bytes]:
    """The next frames that are no heartbeat, which may come at any moment."""
    while (frames := await raw.receive())[0] == b"heartbeat":
        pass
    return frames


async def test_hello_and_welcome_become_peer_up_and_connected(face):
    async with face.hub() as hub, face.link("a", hub) as link:
        link.describe({"role": "actor", "slots": 4})
        up = await hub.receive()
        assert (up.kind, up.peer) == (EventKind.PEER_UP, "a")
        told = {"role": "actor", "slots": 4, "name": "a", "schema_version": SCHEMA_VERSION}
        assert up.message.header.pop("greeting") > 0
        assert len(up.message.header.pop("link")) == 16 and up.message.header == told
        assert connected_peers(hub) == ("a",) and not link.connected
        await hub.send("a", WireMessage(Kind.WELCOME, {"credit_bytes": 7}))
        connected = await link.receive()
        assert (connected.kind, connected.peer) == (EventKind.CONNECTED, "hub")
        assert connected.message.header == {"credit_bytes": 7}
        assert link.connected and link.reason == ""


async def test_no_hello_goes_out_before_describe(face):
    async with face.hub() as hub, face.link("a", hub) as link:
        with anyio.move_on_after(0.1) as scope:
            await hub.receive()
        assert scope.cancelled_caught and "describe" in link.reason


async def test_messages_arrive_whole_and_in_order_both_ways(face):
    n = 10 * face.limits.queue_messages_max
    async with face.hub() as hub, face.link("a", hub) as link:
        await face.greet(hub, link)

        async def up():
            for i in range(n):
                await link.send(numbered(i, size=1 + 577 * i))

        async def down():
            for i in range(n):
                await hub.send("a", WireMessage(Kind.ACK, {"n": i}, (b"x", b"", b"yz" * i)))

        async with anyio.create_task_group() as group:
            group.start_soon(up)
            group.start_soon(down)
            for i in range(n):
                event = await hub.receive()
                assert event.kind is EventKind.MESSAGE and event.message.header == {"n": i}
                assert bytes(event.message.frames[0]) == bytes([i % 256]) * (1 + 577 * i)
                event = await link.receive()
                assert event.message.header == {"n": i}
                assert [bytes(f) for f in event.message.frames] == [b"x", b"", b"yz" * i]


async def test_a_reader_that_stops_makes_the_sender_wait_and_loses_nothing(face):
    async with face.hub() as hub, face.link("a", hub) as link:
        await face.greet(hub, link)
        sent = 0

        async def send():
            nonlocal sent
            for i in range(400):
                await link.send(numbered(i, size=100_000))
                sent = i + 1

        async with anyio.create_task_group() as group:
            group.start_soon(send)
            await anyio.sleep(2 * face.silence_seconds_max)  # longer than the silence: back-pressure is no silence
            assert sent < 400
            assert len(hub._mailbox._events) <= face.limits.queue_messages_max
            for i in range(400):
                event = await hub.receive()
                assert event.kind is EventKind.MESSAGE and event.message.header == {"n": i}, event
        assert connected_peers(hub) == ("a",)


async def test_a_slow_peer_does_not_block_sending_to_another(face):
    async with face.hub() as hub, face.link("slow", hub) as slow, face.link("fast", hub) as fast:
        await face.greet(hub, slow)
        await face.greet(hub, fast)
        async with anyio.create_task_group() as group:

            async def flood():
                for i in range(1000):
                    await hub.send("slow", numbered(i, size=100_000))

            group.start_soon(flood)
            for i in range(50):
                await hub.send("fast", numbered(i))
                assert (await fast.receive()).message.header == {"n": i}
            group.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("message", "limit"),
    [
        (WireMessage(Kind.TRAJECTORY, {"x": "y" * 2000}), "header_bytes_max=2000"),
        (WireMessage(Kind.TRAJECTORY, {}, (b"x" * 200_001,)), "message_bytes_max=200000"),
        (WireMessage(Kind.TRAJECTORY, {}, (b"",) * 9), "frames_max=8"),
    ],
)
async def test_a_message_over_a_limit_is_refused_at_the_sender_by_name_of_the_limit(face, message, limit):
    async with face.hub() as hub, face.link("a", hub) as link:
        await face.greet(hub, link)
        with pytest.raises(LimitExceeded, match=limit):
            await link.send(message)
        with pytest.raises(LimitExceeded, match=limit):
            await hub.send("a", message)
        await link.send(numbered(1))
        assert (await hub.receive()).message.header == {"n": 1}


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([b"trajectory", b"{nonsense"], "not JSON"),
        ([b"trajectory", b"[]"], "JSON object"),
        ([b"no-such-kind", b"{}"], "message kinds"),
        ([b"\xff\xfe", b"{}"], "message kinds"),
        ([b"trajectory"], "at least 2 frames"),
        ([b"trajectory", b"{}", b"x" * 200_001], "message_bytes_max=200000"),
        ([b"trajectory", b'{"x":"' + b"y" * 2000 + b'"}'], "header_bytes_max=2000"),
        ([b"trajectory", b"{}"] + [b""] * 9, "frames_max=8"),
        ([b"trajectory", b"{}"] + [b""] * 999, "frames_max=8"),
    ],
)
async def test_bytes_that_are_no_message_are_reported_and_the_connection_goes_on(face, frames, why):
    async with face.hub() as hub:
        raw = face.raw(hub)
        try:
            raw.send([b"hello", b'{"name":"raw","schema_version":%d}' % SCHEMA_VERSION])
            assert (await hub.receive()).kind is EventKind.PEER_UP
            raw.send(frames)
            corrupt = await hub.receive()
            assert (corrupt.kind, corrupt.peer, corrupt.message) == (EventKind.CORRUPT, "raw", None)
            assert why in corrupt.reason
            raw.send([b"trajectory", b'{"n":1}', b"fine"])
            event = await hub.receive()
            assert event.kind is EventKind.MESSAGE and event.message.header == {"n": 1}
        finally:
            raw.close()


async def test_a_connection_that_repeats_invalid_messages_is_given_up_and_no_other(face):
    async with face.hub() as hub, face.link("a", hub) as link:
        await face.greet(hub, link)
        raw = face.raw(hub)
        try:
            raw.send([b"hello", b'{"name":"raw","schema_version":%d}' % SCHEMA_VERSION])
            assert (await hub.receive()).kind is EventKind.PEER_UP
            for _ in range(8):
                raw.send([b"version", b"{nonsense"])
                assert (await hub.receive()).fault is MessageFault.BYTES
            down = await hub.receive()
            assert (down.kind, down.peer) == (EventKind.PEER_DOWN, "raw") and connected_peers(hub) == ("a",)
            assert down.reason == "sent 8 invalid messages"
            assert (await answer(raw))[0] == b"bye"
        finally:
            raw.close()


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([b"trajectory", b"{}"], "HELLO as the first"),
        ([b"hello", b"{}"], "name in HELLO"),
        ([b"hello", b'{"name":"x\\n","schema_version":%d}' % SCHEMA_VERSION], "name in HELLO"),
        ([b"hello", b'{"name":"x","schema_version":77}'], "same Afterplay everywhere"),
    ],
)
async def test_a_connection_that_begins_wrong_is_refused_with_the_reason(face, frames, why):
    async with face.hub() as hub:
        raw = face.raw(hub)
        try:
            raw.send(frames)
            event = await hub.receive()
            assert event.kind is EventKind.CORRUPT and why in event.reason
            kind, header = await answer(raw)
            assert kind == b"refused" and why.encode() in header
            assert connected_peers(hub) == ()
        finally:
            raw.close()


async def test_bye_of_a_link_is_peer_down_after_all_that_it_queued(face):
    async with face.hub() as hub:
        async with face.link("a", hub) as link:
            await face.greet(hub, link)
            for i in range(face.limits.queue_messages_max // 2):
                await link.send(numbered(i, 20_000))
            started = anyio.current_time()
        assert anyio.current_time() - started < 1.5
        for i in range(face.limits.queue_messages_max // 2):
            assert (await hub.receive()).message.header == {"n": i}
        down = await hub.receive()
        assert (down.kind, down.peer) == (EventKind.PEER_DOWN, "a") and "bye" in down.reason
        assert connected_peers(hub) == ()
        with pytest.raises(PeerGone, match="a is not connected"):
            await hub.send("a", numbered(1))


async def test_bye_sent_by_the_user_ends_the_link_with_its_reason(face):
    async with face.hub() as hub, face.link("a", hub) as link:
        await face.greet(hub, link)
        await link.send(WireMessage(Kind.BYE, {"reason": "drained"}))
        down = await hub.receive()
        assert down.kind is EventKind.PEER_DOWN and "drained" in down.reason
        with pytest.raises(TransportClosed):
            await link.send(numbered(1))
        with pytest.raises(TransportClosed):
            await link.receive()


async def test_a_hub_that_closes_delivers_what_it_queued_and_links_find_the_next_one(face):
    await face.fix_address()
    async with face.link("a") as link:
        async with face.hub() as hub:
            await face.greet(hub, link)
            for i in range(10):
                await hub.send("a", numbered(i))
            started = anyio.current_time()
        assert anyio.current_time() - started < 1.5
        for i in range(10):
            assert (await link.receive()).message.header == {"n": i}
        down = await link.receive()
        assert down.kind is EventKind.DISCONNECTED and not link.connected and link.reason
        await link.send(numbered(99))  # dropped: CONNECTED is the time to send again
        async with face.hub() as hub:
            await face.greet(hub, link, again=True)
            await link.send(numbered(100))
            assert (await hub.receive()).message.header == {"n": 100}


async def test_a_link_may_start_before_the_hub(face):
    await face.fix_address()
    async with face.link("early") as link:
        link.describe({"role": "actor"})
        await anyio.sleep(0.1)
        async with face.hub() as hub:
            await face.greet(hub, link)


async def welcome(hub, times: int) -> None:
    """Answer so many HELLOs."""
    while times:
        if (event := await hub.receive()).kind is EventKind.PEER_UP:
            await hub.send(event.peer, WireMessage(Kind.WELCOME))
            times -= 1


async def test_of_two_processes_with_one_name_one_is_told_and_ends_and_the_other_goes_on(face):
    async with face.hub() as hub, face.link("a", hub) as old, face.link("a", hub) as new:
        await face.greet(hub, old)
        new.describe({"role": "actor"})
        await welcome(hub, 3)  # the newer one, then both again: each once
        for _ in range(2):  # between them it was lost
            with pytest.raises(TransportClosed, match="took its place"):
                while True:
                    await old.receive()
        with pytest.raises(TransportClosed, match="took its place"):
            await old.send(numbered(1))
        await hub.send("a", numbered(2))
        while (event := await new.receive()).kind is not EventKind.MESSAGE:
            pass
        assert event.message.header == {"n": 2}
        assert connected_peers(hub) == ("a",)


async def test_a_process_whose_name_was_taken_by_one_that_is_gone_gets_it_back(face):
    async with face.hub() as hub, face.link("a", hub) as link:
        await face.greet(hub, link)
        async with face.link("a", hub) as late:
            late.describe({"role": "actor"})
            down, up = await hub.receive(), await hub.receive()
            assert (down.kind, up.kind) == (EventKind.PEER_DOWN, EventKind.PEER_UP)
            assert "took its name" in down.reason
        await welcome(hub, 1)
        assert [(await link.receive()).kind for _ in range(2)] == [EventKind.DISCONNECTED, EventKind.CONNECTED]
        await hub.send("a", numbered(2))
        assert (await link.receive()).message.header == {"n": 2}


@pytest.mark.parametrize("second", ["a", "b"])
async def test_a_second_hello_on_a_connection_ends_it_and_its_peer_is_down(face, second):
    hello = b'{"name":"%s","schema_version":' + b"%d}" % SCHEMA_VERSION
    async with face.hub() as hub:
        raw = face.raw(hub)
        try:
            raw.send([b"hello", hello % b"a"])
            assert (await hub.receive()).kind is EventKind.PEER_UP
            raw.send([b"hello", hello % second.encode()])
            events = [await hub.receive(), await hub.receive()]
            assert [(e.kind, e.peer) for e in events] == [(EventKind.CORRUPT, "a"), (EventKind.PEER_DOWN, "a")]
            assert connected_peers(hub) == ()
            kind, header = await answer(raw)
            assert kind == b"refused" and b"one HELLO on a connection" in header and b'"final":true' in header
        finally:
            raw.close()


async def test_a_hello_that_may_not_replace_a_peer_is_refused_and_the_peer_stays(face):
    async with face.hub() as hub, face.link("a", hub) as link, face.link("a", hub) as later:
        hub.refuse(lambda hello: "an older process" if hello.get("old") else None)
        await face.greet(hub, link)
        later.describe({"role": "actor", "old": True})
        with pytest.raises(TransportClosed, match="an older process"):
            await later.receive()
            await later.receive()
        assert (await hub.receive()).kind is EventKind.CORRUPT and connected_peers(hub) == ("a",)
        await link.send(numbered(1))
        event = await hub.receive()
        assert (event.kind, event.message.header) == (EventKind.MESSAGE, {"n": 1})


async def test_only_the_answer_to_its_last_hello_connects_a_link(face):
    async with face.hub() as hub, face.link("a", hub) as link:
        link.describe({"role": "actor"})
        up = await hub.receive()
        greeting = up.message.header["greeting"]
        await hub.send("a", WireMessage(Kind.REFUSED, {"reason": "of an earlier message"} | {"greeting": greeting - 1}))
        await hub.send("a", WireMessage(Kind.ORDER, {"n": 0}))
        await hub.send("a", WireMessage(Kind.WELCOME, {"n": 1, "greeting": greeting - 1}))
        await hub.send("a", WireMessage(Kind.WELCOME, {"n": 2, "greeting": greeting}))
        connected = await link.receive()
        assert connected.kind is EventKind.CONNECTED and connected.message.header["n"] == 2


async def test_a_link_that_reconnects_greets_again_with_what_is_true_then(face):
    asked = []

    def hello():
        asked.append(len(asked))
        return {"role": "actor", "asked": asked[-1]}

    async with face.hub() as hub, face.link("a", hub) as link:
        link.describe(hello)
        first = (await hub.receive()).message.header["greeting"]
        await hub.send("a", WireMessage(Kind.WELCOME, {"greeting": first}))
        assert (await link.receive()).kind is EventKind.CONNECTED
        link.reconnect("the two disagree")
        assert (await link.receive()).kind is EventKind.DISCONNECTED
        while (event := await hub.receive()).kind is not EventKind.PEER_UP:
            assert event.kind is EventKind.PEER_DOWN
        assert (event.message.header["greeting"], event.message.header["asked"]) == (first + 1, 1)


async def test_the_answer_to_the_first_hello_of_a_process_does_not_connect_the_one_that_follows_it(face):
    async with face.hub() as hub:
        async with face.link("a", hub) as before:
            before.describe({"role": "actor"})
            late = (await hub.receive()).message.header["greeting"]
        async with face.link("a", hub) as link:
            link.describe({"role": "actor"})
            while (up := await hub.receive()).kind is not EventKind.PEER_UP:
                pass
            await hub.send("a", WireMessage(Kind.WELCOME, {"n": 1, "greeting": late}))
            await hub.send("a", WireMessage(Kind.WELCOME, {"n": 2, "greeting": up.message.header["greeting"]}))
            assert (await link.receive()).message.header["n"] == 2


async def test_a_payload_that_arrived_may_be_sent_on_under_a_longer_header(face):
    async with face.hub() as hub, face.link("a", hub) as link:
        await face.greet(hub, link)
        await link.send(WireMessage(Kind.TRAJECTORY, {}, (b"x" * face.limits.message_bytes_max,)))
        arrived = (await hub.receive()).message
        await hub.send("a", WireMessage(Kind.DELIVERY, {"rewards": {"r": 0.5} | {"s" * 1000: 1.0}}, arrived.frames))
        assert (await link.receive()).message.n_bytes == face.limits.message_bytes_max


async def test_a_hello_refused_by_the_stage_ends_the_link_with_the_reason(face):
    async with face.hub() as hub, face.link("a", hub) as link:
        link.describe({"role": "nobody"})
        up = await hub.receive()
        await hub.send(up.peer, WireMessage(Kind.REFUSED, {"reason": "no such role"}))
        refused = await link.receive()
        assert refused.message.header == {"reason": "no such role"}
        with pytest.raises(TransportClosed, match="no such role"):
            await link.receive()
        down = await hub.receive()
        assert (down.kind, down.peer) == (EventKind.PEER_DOWN, "a")


async def test_sending_to_an_unknown_peer_raises_peer_gone(face):
    async with face.hub() as hub:
        with pytest.raises(PeerGone, match="nobody"):
            await hub.send("nobody", numbered(1))


async def test_receiving_and_sending_after_close_raise_transport_closed(face):
    async with face.hub() as hub, face.link("a", hub) as link:
        await face.greet(hub, link)
    for end in (hub, link):
        with pytest.raises(TransportClosed):
            await end.receive()
    with pytest.raises(TransportClosed):
        await hub.send("a", numbered(1))
    with pytest.raises(TransportClosed):
        await link.send(numbered(1))


@pytest.mark.slow
async def test_idle_peers_are_kept_alive_by_heartbeats(face):
    async with face.hub() as hub, face.link("a", hub) as link:
        await face.greet(hub, link)
        await anyio.sleep(2 * face.silence_seconds_max)
        assert connected_peers(hub) == ("a",) and link.connected
        assert not len(hub._mailbox._events) and not len(link._mailbox._events), "nobody sees them"


async def test_a_peer_that_is_silent_too_long_is_dropped(face):
    async with face.hub() as hub:
        raw = face.raw(hub)
        try:
            raw.send([b"hello", b'{"name":"mute","schema_version":%d}' % SCHEMA_VERSION])
            assert (await hub.receive()).kind is EventKind.PEER_UP
            started = anyio.current_time()
            down = await hub.receive()
            assert (down.kind, down.peer) == (EventKind.PEER_DOWN, "mute") and "silent" in down.reason
            assert anyio.current_time() - started >= face.silence_seconds_max
            assert connected_peers(hub) == ()
            raw.send([b"trajectory", b'{"n":1}'])  # late: told so, not reported as corrupt
            assert (await answer(raw))[0] == b"bye"
            assert not len(hub._mailbox._events)
        finally:
            raw.close()


async def test_cancelling_receive_loses_no_event(face):
    async with face.hub() as hub, face.link("a", hub) as link:
        await face.greet(hub, link)
        for n in range(20):
            with anyio.move_on_after(0.001):
                await hub.receive()
            await link.send(numbered(n))
            assert (await hub.receive()).message.header == {"n": n}


async def test_an_exception_in_the_block_leaves_unwrapped_and_cancellation_passes(face):
    with pytest.raises(KeyError):
        async with face.hub():
            raise KeyError("mine")
    with anyio.move_on_after(0.05) as scope:
        async with face.hub() as hub, face.link("a", hub):
            await anyio.sleep_forever()
    assert scope.cancelled_caught


async def test_a_hello_that_cannot_be_sent_ends_the_link_with_the_limit(face):
    async with face.hub() as hub, face.link("a", hub) as link:
        link.describe({"holding": ["x" * 100] * 30})
        with pytest.raises(TransportClosed, match="header_bytes_max"):
            await link.receive()


async def test_large_frames_are_views_of_what_arrived(face):
    async with face.hub() as hub, face.link("a", hub) as link:
        await face.greet(hub, link)
        await link.send(numbered(7, size=150_000))
        frame = (await hub.receive()).message.frames[0]
        assert frame[:3] == b"\x07\x07\x07" and len(frame) == 150_000
        if face.name != "memory":
            assert isinstance(frame, memoryview)


async def test_a_sender_that_waits_for_a_peer_that_dies_gets_peer_gone(face):
    async with face.hub() as hub:
        raw = face.raw(hub)
        raw.send([b"hello", b'{"name":"raw","schema_version":%d}' % SCHEMA_VERSION])
        assert (await hub.receive()).kind is EventKind.PEER_UP
        sent = 0

        async def flood():
            nonlocal sent
            with pytest.raises(PeerGone, match="raw"):
                for i in range(10_000):
                    await hub.send("raw", numbered(i, size=100_000))
                    sent = i + 1

        async with anyio.create_task_group() as group:
            group.start_soon(flood)
            await anyio.sleep(0.1)
            assert sent < 10_000
            raw.close()
        assert (await hub.receive()).kind is EventKind.PEER_DOWN


async def test_a_sender_that_waits_for_a_hub_that_closes_goes_on(face):
    await face.fix_address()
    async with face.link("a") as link, anyio.create_task_group() as group:
        async with face.hub() as hub:
            await face.greet(hub, link)

            sent = 0

            async def flood():
                nonlocal sent
                for i in range(2000):
                    await link.send(numbered(i, size=100_000))
                    sent = i + 1
                group.cancel_scope.cancel()

            group.start_soon(flood)
            await anyio.sleep(0.1)
            assert sent < 2000
        await anyio.sleep_forever()
    assert sent == 2000, "the rest was dropped: CONNECTED is the time to send it again"


async def test_a_frame_that_is_not_contiguous_is_refused_before_anything_is_sent(face):
    async with face.hub() as hub, face.link("a", hub) as link:
        await face.greet(hub, link)
        with pytest.raises(WireError, match="contiguous"):
            await link.send(WireMessage(Kind.TRAJECTORY, {}, (memoryview(b"abcdef")[::2],)))
        await link.send(numbered(1))
        assert (await hub.receive()).message.header == {"n": 1}
