"""Hostile messages, handshakes and HTTP requests, drawn from a seed. Pure: it opens no connection."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import cycle
from typing import Any

import orjson

from pipeline.schema import SCHEMA_VERSION
from pipeline.transport.messages import Kind

_RAW = "\u0001"
"""Begins and ends the name of a value that is no JSON of orjson's: it is written into the bytes afterwards."""
_RAW_VALUES: Mapping[str, bytes] = {
    "deep": b"[" * 1000 + b"]" * 1000,
    "deep objects": b'{"a":' * 700 + b"1" + b"}" * 700,
    "too deep for orjson to write": b"[" * 300 + b"]" * 300,
    "too deep to read": b"[" * 5000 + b"]" * 5000,
    "nan": b"NaN",
    "infinite": b"1e999",
    "huge": b"9" * 4000,
    "surrogate": b'"\\ud800"',
    "no utf-8": b'"\xff\xfe"',
}
_PLAIN_VALUES: Sequence[Any] = (
    *(None, True, False, 0, 1, -1, 0.5, 1e300, -1e300, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *("", "x", "\u0000", "\u202e", "../../etc/passwd", "'; DROP TABLE orders; --", "1e300", "x" * 10_000, "ä" * 300),
    *([], {}, [[]], [None], [{}], [1e300], ["x"] * 2000, {"": ""}, {"x" * 500: 1}, list(range(3000))),
)


def values(rng: random.Random, strangers: Sequence[str] = ()) -> Iterator[Any]:
    """Values that no key of a header has. ``strangers``: ids that belong to others."""
    marks = [_RAW + name + _RAW for name in _RAW_VALUES]
    while True:
        yield rng.choice((*_PLAIN_VALUES, *marks, *strangers))


def as_json(value: Any) -> bytes:
    """JSON with the raw values written in."""
    data = orjson.dumps(value)
    for name, raw in _RAW_VALUES.items():
        data = data.replace(orjson.dumps(_RAW + name + _RAW), raw)
    return data


def mutated(rng: random.Random, value: Any, hostile: Iterator[Any]) -> Any:
    """A copy of ``value`` in which one part, at any depth, is replaced, missing or new."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        copy, key = dict(value), rng.choice(list(value))
        match rng.randrange(8):
            case 0:
                del copy[key]
            case 1:
                copy[str(next(hostile))[:200]] = next(hostile)
            case _:
                copy[key] = mutated(rng, value[key], hostile)
        return copy
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], mutated(rng, value[at], hostile), *value[at + 1 :]]
    return next(hostile)


HELLO_OF_AN_ACTOR: Mapping[str, Any] = {
    "role": "actor",
    "name": "actor-1",
    "schema_version": SCHEMA_VERSION,
    "greeting": 1,
    "slots": 1,
    "splits": {"guess": {"train": [[0, 900, 1]]}},
    "holding": ["g000000.0.0"],
}
HELLO_OF_A_LEARNER: Mapping[str, Any] = {
    "role": "learner",
    "name": "learner",
    "schema_version": SCHEMA_VERSION,
    "greeting": 1,
    "session": "s",
    "epoch": 0,
    "number": 0,
    "updates": 0,
    "announced": [0, 0],
    "durable_updates": 0,
    "credit_groups": 8,
    "holding": ["g000000"],
    "consumed": [[0, ["g000000"]]],
    "trained": [[0, {"ess": {"all": 0.5}, "entropy": {"g000000.0.0": 1.0}}]],
}
HEADERS: Mapping[Kind, Mapping[str, Any]] = {
    Kind.HELLO: HELLO_OF_AN_ACTOR,
    Kind.TRAJECTORY: {"trajectory_id": "g000001.0.0"},
    Kind.LESSONS_QUERY: {"order_id": "g000001.0.0", "query": "x", "top_k": 3},
    Kind.CONSUMED: {
        "number": 1,
        "update": 0,
        "group_ids": ["g000000"],
        "policy_version": 0,
        "replayed": {"g000000": ["g000000.0.0"]},
        "ess": {"all": 0.5, "fresh": 1.0},
        "entropy": {"g000000.0.0": 0.5},
        "choice_failed": 0,
    },
    Kind.VERSION: {"number": 1, "policy_version": 1, "updates": 1},
    Kind.CHECKPOINTED: {"number": 1, "updates": 1},
    Kind.ENGINES: {"engines": {"http://127.0.0.1:9": {"fit": True, "reason": "", "running": 1, "waiting": 0}}},
    Kind.WATCH: {},
    Kind.BYE: {"reason": "x"},
    Kind.HEARTBEAT: {},
    Kind.WELCOME: {"greeting": 1, "credit_bytes": 1, "policy_version": 0},
    Kind.ACK: {"trajectory_ids": ["g000001.0.0"], "refused": {}},
    Kind.CANCEL: {"order_ids": ["g000001.0.0"], "reason": "x"},
    Kind.ORDER: {"order_id": "g000001.0.0", "task": {"task_id": "a", "environment": "guess", "seed": 1}},
    Kind.PLAN: {"group_id": "g000001", "update": 1},
    Kind.DELIVERY: {"group_id": "g000001", "trajectory_id": "g000001.0.0", "reward": 1.0},
    Kind.EVALUATION: {"evaluating": None},
    Kind.LESSONS: {"order_id": "g000001.0.0", "lessons": []},
    Kind.REFUSED: {"reason": "x"},
}
"""A header of each kind as a peer may send it; those of the stage too."""


def mutated_frames(rng: random.Random, frames: Sequence[bytes], hostile: Iterator[Any]) -> list[bytes]:
    """A payload with a mutated header, or with frames that are cut, longer, damaged, missing or too many."""
    found = [bytes(frame) for frame in frames]
    if not found:
        return [rng.randbytes(rng.randrange(200)) for _ in range(rng.randrange(6))]
    if rng.random() < 0.6:
        return [as_json(mutated(rng, orjson.loads(found[0]), hostile)), *found[1:]]
    at = rng.randrange(len(found))
    match rng.randrange(5):
        case 0:
            found[at] = found[at][: rng.randrange(len(found[at]) + 1)]
        case 1:
            found[at] += rng.randbytes(rng.randrange(1, 64))
        case 2:
            found[at] = rng.randbytes(len(found[at]))
        case 3:
            del found[at]
        case _:
            found += [b""] * rng.choice((1, 100))
    return found


def messages(
    rng: random.Random,
    payload: Sequence[bytes] = (),
    strangers: Sequence[str] = (),
    names: Sequence[str] = ("actor-1", "learner"),
) -> Iterator[list[bytes]]:
    """``[kind, header, frame …]`` of every kind in turn, mutated. ``payload``: frames of a trajectory, ``names``: those
    under which HELLO is said."""
    hostile = values(rng, strangers)
    for kind in cycle(HEADERS):
        header: Any = dict(HEADERS[kind])
        if kind is Kind.HELLO:
            header = dict(rng.choice((HELLO_OF_AN_ACTOR, HELLO_OF_AN_ACTOR, HELLO_OF_A_LEARNER)))
            header["name"] = rng.choice(names)
        for _ in range(rng.choice((0, 1, 1, 1, 2))):
            header = mutated(rng, header, hostile)
        frames = mutated_frames(rng, payload, hostile) if kind is Kind.TRAJECTORY or rng.random() < 0.1 else []
        head = kind.value.encode() if rng.random() < 0.97 else rng.randbytes(rng.randrange(40))
        yield [head, as_json(header), *frames]


_SIGNATURE = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f"


def _greeting(mechanism: bytes, version: bytes = b"\x03\x00", as_server: bytes = b"\x00") -> bytes:
    return _SIGNATURE + version + mechanism.ljust(20, b"\x00") + as_server + bytes(31)


def _command(name: bytes, body: bytes) -> bytes:
    data = bytes([len(name)]) + name + body
    return (b"\x04" + bytes([len(data)]) if len(data) < 256 else b"\x06" + len(data).to_bytes(8, "big")) + data


def handshakes(rng: random.Random) -> Iterator[bytes]:
    """Bytes of a connection to a ZeroMQ socket that requires CURVE, none of which opens it."""
    curve = _greeting(b"CURVE")
    hello = _command(b"HELLO", b"\x01\x00" + bytes(72) + rng.randbytes(120))
    while True:
        yield rng.randbytes(rng.randint(1, 4000))
        yield curve[: rng.randrange(64)]
        yield _greeting(rng.choice((b"NULL", b"PLAIN", b"GSSAPI", b"", b"CURVE2"))) + b"\x04\x05READY"
        yield _greeting(b"CURVE", version=bytes([rng.randrange(256), rng.randrange(256)]))
        yield _greeting(b"CURVE", as_server=b"\x01") + hello
        yield curve + hello
        yield curve + hello[: rng.randrange(len(hello))]
        yield curve + _command(b"HELLO", b"\x01\x00" + bytes(72) + rng.randbytes(rng.randrange(400)))
        yield curve + _command(b"INITIATE", rng.randbytes(300))
        yield curve + b"\x06" + rng.choice((2**62, 2**63, 2**64 - 1, 2**32)).to_bytes(8, "big") + b"x" * 100
        yield curve + b"\x02" + (2**63 - 1).to_bytes(8, "big")
        yield curve + b"\x01\x05hello" + b"\x00\x02{}"
        yield b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
        yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(60)
        yield b""


class Manner(StrEnum):
    """Ways in which a client treats its connection."""

    ASK = "ask"
    """It sends, and reads until the server is done or an answer came."""
    LEAVE = "leave"
    """It sends, and closes at once."""
    RESET = "reset"
    """It sends, and resets the connection."""
    HALF = "half"
    """It sends, shuts its sending side, and reads."""
    HOLD = "hold"
    """It sends, and holds the connection open."""


@dataclass(frozen=True, slots=True)
class HttpTarget:
    """Routes of a server, for requests that are nearly right."""

    routes: Sequence[tuple[str, str]]
    """Method and path."""
    bodies: Sequence[Mapping[str, Any]] = ({},)
    headers: Sequence[tuple[str, str]] = ()
    """Any of them may be sent: keys that are known, of another role or wrong."""
    body_bytes_max: int = 200_000
    strangers: Sequence[str] = field(default=())


_WRONG_KEYS = ("Bearer wrong", "Bearer ", "Basic eDp5", "bearer\t\xff\xfe", "Bearer " + "k" * 4000, "\xff\xfe")


def requests(rng: random.Random, target: HttpTarget) -> Iterator[tuple[Manner, bytes]]:
    """Requests, none of which has to be served."""
    hostile = values(rng, target.strangers)
    while True:
        method, path = rng.choice(target.routes)
        sent = [rng.choice((*target.headers, *(("Authorization", key) for key in _WRONG_KEYS)))]
        body = as_json(mutated(rng, rng.choice(target.bodies), hostile))
        manner = rng.choice((Manner.ASK,) * 12 + (Manner.LEAVE, Manner.LEAVE, Manner.RESET, Manner.HALF, Manner.HOLD))
        match rng.randrange(20):
            case 0:
                path = rng.choice(
                    ("/", "//", "/../..", "/%00", "/%ff", "/\xff\xfe", "*", "http://x/", "/" + "a" * 9000)
                )
            case 1:
                method = rng.choice(("DELETE", "OPTIONS", "TRACE", "CONNECT", "FOO", "\xff", "", "POST" * 50))
            case 2:
                sent += [(f"X-{n}", "y" * 50) for n in range(rng.choice((50, 200, 2000)))]
            case 3:
                sent.append(("X-Long", "z" * rng.choice((5_000, 70_000, 200_000))))
            case 4:
                body = b" " * rng.randrange(target.body_bytes_max) + body
            case 5:
                yield manner, rng.randbytes(rng.randint(1, 3000))
                continue
            case 6:
                yield manner, _request(method, path, sent, body, f"{rng.choice((2**40, -1, 'x', len(body) + 9))}")
                continue
            case 7:
                chunks = rng.choice((b"ffffffffffffffff\r\n", b"5\r\nhello", b"zz\r\n", b"-1\r\n", b"0\r\n\r\n" * 20))
                yield manner, _request(method, path, [*sent, ("Transfer-Encoding", "chunked")], chunks, None)
                continue
            case 8:
                whole = _request(method, path, sent, body, None)
                yield Manner.HOLD if rng.random() < 0.5 else manner, whole[: rng.randrange(len(whole))]
                continue
            case 9:
                yield manner, _request(method, path, sent, body) * rng.choice((2, 10, 30))
                continue
            case 10:
                yield manner, _request(method, path, [*sent, ("Content-Encoding", "gzip")], body)
                continue
            case 11:
                upgrade = [("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Key", "x")]
                yield manner, _request("GET", path, [*sent, *upgrade], b"")
                continue
            case _:
                pass
        yield manner, _request(method, path, sent, body)


def _request(method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes, length: str | None = "") -> bytes:
    """``length``: the value of Content-Length, None for no such header."""
    lines = [f"{method} {path} HTTP/1.1", "Host: x", *(f"{name}: {value}" for name, value in headers)]
    if length is not None:
        lines.append(f"Content-Length: {length or len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body
