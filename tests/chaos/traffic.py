"""Seeded requests of many kinds, and how each of them ended: what clients of a cluster send, and see.

Knows HTTP, the proxy in front of the nodes and the form of `kv_transfer_params`; nothing of how nodes work.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import httpx

BOUND_S = 60.0
"""Every request ends within this: the proxy's 10 s for a prefill, a stop of 8 s, Open 6 s, Done 6 s, a queue, slack."""
MAX_OUTPUT_TOKENS = 12
VOCABULARY = 512

Params = dict[str, Any]
Prompt = tuple[int, ...]


class Kind(StrEnum):
    """What a client does."""

    WHOLE = "whole"
    STREAMED = "streamed"
    LEAVES_WAITING = "leaves waiting"
    LEAVES_READING = "leaves reading"
    TWIN = "twin"
    """Sent at the same time as another one of the same prompt and X-Request-Id."""
    REPLAYED = "replayed"
    """Sent to the decode node itself, twice, with the params of one prefill."""
    FOREIGN = "foreign"
    """Sent to the decode node itself with the params of another prompt's prefill."""
    FORGED = "forged"


SHARES = {
    Kind.WHOLE: 35,
    Kind.STREAMED: 25,
    Kind.LEAVES_WAITING: 8,
    Kind.LEAVES_READING: 6,
    Kind.TWIN: 4,
    Kind.REPLAYED: 5,
    Kind.FOREIGN: 3,
    Kind.FORGED: 10,
}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `leaves_after_s` is when a client that does not wait closes its connection."""

    number: int
    kind: Kind
    prompt: Prompt
    max_tokens: int
    request_id: str
    leaves_after_s: float = 0.0
    foreign: Prompt = ()
    forgery: Mapping[str, Any] | None = None


class Outcome(StrEnum):
    """How a request ended for its client."""

    RIGHT = "right"
    WRONG = "wrong text"
    LEFT = "left"
    REFUSED = "refused"
    BROKEN = "broken"
    HUNG = "hung"


@dataclass(frozen=True, slots=True)
class Ending:
    """`cause` says more where it is not RIGHT; times are those of time.monotonic()."""

    ask: Ask
    outcome: Outcome
    cause: str
    began: float
    ended: float


class BrokenOff(RuntimeError):
    """A stream that ended with an error event, or without its end."""


def make_prompts(source: random.Random, count: int) -> list[Prompt]:
    """Different prompts of 2 to about 170 tokens, most with a beginning that others have too."""
    beginnings = [_tokens(source, source.randrange(16, 100)) for _ in range(12)]
    prompts: set[Prompt] = set()
    while len(prompts) < count:
        beginning = source.choice([(), *beginnings])
        prompts.add(beginning + _tokens(source, source.choice([2, 3, 15, 16, 17, 31, 33, 47, 64, 70])))
    return sorted(prompts)


def make_asks(source: random.Random, prompts: Sequence[Prompt], count: int) -> list[Ask]:
    """`count` requests in the order in which they are sent."""
    asks: list[Ask] = []
    while len(asks) < count:
        kind = source.choices(list(SHARES), list(SHARES.values()))[0]
        forgery = forged(source) if kind is Kind.FORGED else None
        prompt, foreign = source.sample(prompts, 2)
        leaves_after_s, max_tokens = source.choice([0.02, 0.05, 0.1, 0.3]), source.randint(1, MAX_OUTPUT_TOKENS)
        request_id = f"{source.getrandbits(64):016x}"
        for _ in range(2 if kind is Kind.TWIN else 1):
            number = len(asks)
            asks.append(Ask(number, kind, prompt, max_tokens, request_id, leaves_after_s, foreign, forgery))
    return asks[:count]


def forged(source: random.Random) -> Params:
    """Params that no prefill node gave out: well-formed ones, and such with one wrong field."""
    made_up: Params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "capability": f"{source.getrandbits(128):032x}",
        "incarnation": f"{source.getrandbits(128):032x}",
        "host": "127.0.0.1",
        "port": 9,
        "num_tokens": source.choice([1, 16, 2**31 - 1]),
    }
    wrong: list[Params] = [
        {},
        {"host": "169.254.169.254"},
        {"host": "no such host!"},
        {"host": ["127.0.0.1"]},
        {"port": "1"},
        {"port": 2**62},
        {"port": True},
        {"capability": 5},
        {"capability": "../../etc/passwd"},
        {"incarnation": None},
        {"num_tokens": -1},
        {"num_tokens": 1.5},
        {"num_tokens": 10**20},
        {"do_remote_prefill": "yes"},
        {"do_remote_decode": True},
        {"remote_block_ids": [[1, 2]], "remote_engine_id": "x"},
    ]
    return made_up | source.choice(wrong)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Base addresses, one HTTP client for all threads, and what a single node answers to every prompt."""

    http: httpx.Client
    proxy: str
    prefill: str
    decode: str
    texts: Mapping[Prompt, Sequence[int]]

    def send(self, ask: Ask) -> Ending:
        """Do what the client of `ask` does, and say how it ended."""
        began = time.monotonic()
        outcome, cause = self._outcome(ask)
        ended = time.monotonic()
        if ended - began > BOUND_S:
            outcome, cause = Outcome.HUNG, f"{outcome} after {ended - began:.0f} s"
        return Ending(ask, outcome, cause, began, ended)

    def _outcome(self, ask: Ask) -> tuple[Outcome, str]:
        try:
            answers = list(self._answers(ask))
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            return Outcome.REFUSED if status < 500 else Outcome.BROKEN, f"HTTP {status}"
        except httpx.ReadTimeout:
            is_leaving = ask.kind is Kind.LEAVES_WAITING
            return (Outcome.LEFT, "") if is_leaving else (Outcome.HUNG, f"nothing for {BOUND_S:g} s")
        except (httpx.TransportError, BrokenOff) as error:
            return Outcome.BROKEN, type(error).__name__
        expected = list(self.texts[ask.prompt][: ask.max_tokens])
        is_left = ask.kind is Kind.LEAVES_READING
        for answer in answers:
            if answer != (expected[: len(answer)] if is_left else expected):
                return Outcome.WRONG, f"{answer} instead of {expected}"
        return (Outcome.LEFT if is_left else Outcome.RIGHT), ""

    def _answers(self, ask: Ask) -> Iterator[list[int]]:
        """The tokens of every answer this client gets."""
        match ask.kind:
            case Kind.WHOLE | Kind.TWIN:
                yield self._whole(self.proxy, ask, None)
            case Kind.LEAVES_WAITING:
                yield self._whole(self.proxy, ask, None, timeout_s=ask.leaves_after_s)
            case Kind.STREAMED:
                yield self._streamed(ask)
            case Kind.LEAVES_READING:
                yield self._streamed(ask, num_events=ask.max_tokens // 2)
            case Kind.REPLAYED:
                params = self._prefill(ask.prompt)
                yield self._whole(self.decode, ask, params)
                yield self._whole(self.decode, ask, params)
            case Kind.FOREIGN:
                yield self._whole(self.decode, ask, self._prefill(ask.foreign))
            case Kind.FORGED:
                assert ask.forgery is not None
                yield self._whole(self.decode, ask, dict(ask.forgery))

    def _prefill(self, prompt: Prompt) -> Params | None:
        body = request_body(prompt, 1) | {"kv_transfer_params": {"do_remote_decode": True}}
        answer = self.http.post(self.prefill + "/v1/completions", json=body, timeout=BOUND_S).raise_for_status()
        params: Params | None = answer.json().get("kv_transfer_params")
        return params

    def _whole(self, url: str, ask: Ask, params: Params | None, timeout_s: float = BOUND_S) -> list[int]:
        body = request_body(ask.prompt, ask.max_tokens)
        if params is not None:
            body["kv_transfer_params"] = params
        headers, timeout = {"X-Request-Id": ask.request_id}, httpx.Timeout(BOUND_S, read=timeout_s)
        answer = self.http.post(url + "/v1/completions", json=body, headers=headers, timeout=timeout)
        tokens: list[int] = answer.raise_for_status().json()["choices"][0]["token_ids"]
        return tokens

    def _streamed(self, ask: Ask, num_events: int | None = None) -> list[int]:
        """The tokens of a stream; with `num_events` the client leaves after that many."""
        body = request_body(ask.prompt, ask.max_tokens) | {"stream": True}
        tokens: list[int] = []
        headers = {"X-Request-Id": ask.request_id}
        with self.http.stream(
            "POST", self.proxy + "/v1/completions", json=body, headers=headers, timeout=BOUND_S
        ) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if num_events is not None and len(tokens) >= num_events:
                    return tokens
                match line.removeprefix("data: "):
                    case "":
                        continue
                    case "[DONE]":
                        return tokens
                    case payload:
                        tokens += tokens_of_event(json.loads(payload))
        raise BrokenOff("a stream without end")


def request_body(prompt: Prompt, max_tokens: int) -> Params:
    """A greedy completion that answers token ids."""
    return {
        "model": "m",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def tokens_of_event(event: Params) -> list[int]:
    """The tokens of one event of a stream. Raises BrokenOff for an error event."""
    if "error" in event:
        raise BrokenOff(str(event["error"]))
    return [token for choice in event["choices"] for token in choice.get("token_ids") or ()]


def single_node_texts(http: httpx.Client, url: str, prompts: Sequence[Prompt]) -> dict[Prompt, list[int]]:
    """What one node without any transfer answers to each prompt, MAX_OUTPUT_TOKENS of it."""
    texts: dict[Prompt, list[int]] = {}
    for first in range(0, len(prompts), 64):
        batch = prompts[first : first + 64]
        body = request_body((), MAX_OUTPUT_TOKENS) | {"prompt": [list(prompt) for prompt in batch]}
        answer = http.post(url + "/v1/completions", json=body, timeout=300.0).raise_for_status().json()
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        texts |= {prompt: choice["token_ids"] for prompt, choice in zip(batch, choices, strict=True)}
    return texts


def _tokens(source: random.Random, count: int) -> Prompt:
    return tuple(source.randrange(2, VOCABULARY) for _ in range(count))
