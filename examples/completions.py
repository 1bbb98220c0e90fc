"""Greedy completions from an OpenAI-compatible server, streamed or in one piece."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import httpx

from examples.prompts import Prompt

MODEL_NAME = "smollm2"
NUM_OUTPUT_TOKENS = 16
REQUEST_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of the demo."""

    prompt: Prompt
    stream: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """A completed text. `first_token_s` is None for answers that came in one piece."""

    text: str
    num_prompt_tokens: int
    first_token_s: float | None


def new_client() -> httpx.Client:
    """A client with a limit on every wait, which ignores proxies of the environment."""
    return httpx.Client(timeout=REQUEST_TIMEOUT_S, trust_env=False)


def complete(client: httpx.Client, url: str, ask: Ask) -> Answer:
    """The greedy completion of a prompt by the server at `url`."""
    body = {
        "model": MODEL_NAME,
        "prompt": ask.prompt.text,
        "max_tokens": NUM_OUTPUT_TOKENS,
        "temperature": 0,
    }
    address = f"{url}/v1/completions"
    if ask.stream:
        return complete_streamed(client, address, body)
    answer = client.post(address, json=body).raise_for_status().json()
    return Answer(answer["choices"][0]["text"], answer["usage"]["prompt_tokens"], None)


def complete_streamed(client: httpx.Client, address: str, body: dict[str, object]) -> Answer:
    """As `complete`, reading server-sent events."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    pieces: list[str] = []
    first_token_s, num_prompt_tokens = None, 0
    began = time.monotonic()
    with client.stream("POST", address, json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            payload = line.removeprefix("data: ")
            if not payload or payload == "[DONE]":
                continue
            event = json.loads(payload)
            if "error" in event:
                raise httpx.RemoteProtocolError(f"{address}: {event['error']}")
            pieces += [choice["text"] for choice in event["choices"]]
            if pieces and first_token_s is None:
                first_token_s = time.monotonic() - began
            if event.get("usage"):
                num_prompt_tokens = event["usage"]["prompt_tokens"]
    return Answer("".join(pieces), num_prompt_tokens, first_token_s)
