"""Proxy for disaggregated prefill: one OpenAI address in front of prefill nodes (P) and decode nodes (D).

A request goes to P first, with `max_tokens=1`; P answers with `kv_transfer_params`, which the proxy puts into
the original request for D and otherwise does not look at. D's answer is passed through as it comes. Whatever
goes wrong on P's side costs time, not the request: D then prefills itself. Knows HTTP and the parameters of
the usual vLLM flow, and nothing about kvweave.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, generate_latest

logger = logging.getLogger("kvweave.proxy")

Body = dict[str, Any]
Result = TypeVar("Result")
PREFILL_PARAMS = {"do_remote_decode": True, "do_remote_prefill": False}
DROPPED_FOR_PREFILL = ("stream_options", "min_tokens", "kv_transfer_params")
PASSED_HEADERS = ("content-type", "x-request-id")


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """Base addresses of the nodes, and limits in seconds.

    `prefill_timeout_s` bounds a whole prefill, `decode_timeout_s` the silence between pieces of D's answer.
    """

    prefill_urls: tuple[str, ...]
    decode_urls: tuple[str, ...]
    connect_timeout_s: float = 5.0
    prefill_timeout_s: float = 120.0
    decode_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for url in (*self.prefill_urls, *self.decode_urls):
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"node address {url!r} has no scheme; write http://{url}")
        if not self.decode_urls:
            raise ValueError("no decode node given; at least one is needed, pass --decode URL")
        for name in ("connect_timeout_s", "prefill_timeout_s", "decode_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be more than 0")


class PrefillFailed(RuntimeError):
    """P did not deliver. `cause` is short and has few values, it labels a counter."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause


class ClientGone(RuntimeError):
    """The client closed its connection before it had its answer."""


class Counters:
    """What the proxy counts, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("kvweave_proxy_requests", "Requests received", registry=self.registry)
        self.fallbacks = Counter(
            "kvweave_proxy_fallbacks", "Requests that D prefilled", ["cause"], registry=self.registry
        )
        self.decode_failures = Counter(
            "kvweave_proxy_decode_failures", "Requests that D failed", registry=self.registry
        )
        self.disconnects = Counter(
            "kvweave_proxy_disconnects", "Requests whose client went away", registry=self.registry
        )


def prefill_body(body: Mapping[str, Any]) -> Body:
    """The request that makes P compute the prompt and one token, and keep the KV for a D."""
    reduced = {key: value for key, value in body.items() if key not in DROPPED_FOR_PREFILL}
    reduced.update(stream=False, max_tokens=1, n=1, kv_transfer_params=dict(PREFILL_PARAMS))
    if "messages" in body or "max_completion_tokens" in body:
        reduced["max_completion_tokens"] = 1
    return reduced


def has_several_prompts(body: Mapping[str, Any]) -> bool:
    """Whether a completions request holds a batch of prompts; `kv_transfer_params` can describe one only."""
    prompt = body.get("prompt")
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)


class Proxy:
    """The flow of one request, over two round-robin lists of nodes and one HTTP client."""

    def __init__(self, config: ProxyConfig, client: httpx.AsyncClient) -> None:
        self.config = config
        self.counters = Counters()
        self._client = client
        self._prefill_urls = itertools.cycle(config.prefill_urls)
        self._decode_urls = itertools.cycle(config.decode_urls)

    async def generate(self, request: Request) -> Response:
        """Answer `/v1/completions` or `/v1/chat/completions`."""
        self.counters.requests.inc()
        try:
            body = await request.json()
        except json.JSONDecodeError as error:
            return error_response(400, "invalid_request_error", f"the body is not JSON: {error}")
        if not isinstance(body, dict):
            return error_response(400, "invalid_request_error", "the body is not a JSON object")
        headers = node_headers(request)
        try:
            params = await self._prefill_or_none(request, body, headers)
            # P's answer replaces whatever a client may have sent under this name.
            body.pop("kv_transfer_params", None)
            if params is not None:
                body["kv_transfer_params"] = params
            return await self._decode(request, body, headers)
        except ClientGone:
            self.counters.disconnects.inc()
            logger.info("request %s: client went away", headers["X-Request-Id"])
            return Response(status_code=499)

    async def models(self) -> Response:
        """D's answer to `/v1/models`."""
        url = f"{next(self._decode_urls)}/v1/models"
        try:
            answer = await self._client.get(url, timeout=self.config.connect_timeout_s)
        except httpx.HTTPError as error:
            return error_response(502, "decode_unavailable", f"no answer from {url}: {describe(error)}")
        return Response(answer.content, answer.status_code, media_type="application/json")

    async def _prefill_or_none(self, request: Request, body: Body, headers: Mapping[str, str]) -> Body | None:
        try:
            return await unless_gone(request, self._prefill(request.url.path, body, headers))
        except PrefillFailed as failure:
            self.counters.fallbacks.labels(failure.cause).inc()
            logger.warning("request %s: D prefills itself (%s): %s", headers["X-Request-Id"], failure.cause, failure)
            return None

    async def _prefill(self, path: str, body: Body, headers: Mapping[str, str]) -> Body:
        if not self.config.prefill_urls:
            raise PrefillFailed("no_prefill_node", "no prefill node is configured")
        if has_several_prompts(body):
            raise PrefillFailed("several_prompts", "a batch of prompts cannot be handed over")
        url = next(self._prefill_urls) + path
        timeout = httpx.Timeout(None, connect=self.config.connect_timeout_s)
        try:
            async with asyncio.timeout(self.config.prefill_timeout_s):
                answer = await self._client.post(url, json=prefill_body(body), headers=headers, timeout=timeout)
        except TimeoutError as error:
            raise PrefillFailed("timeout", f"{url}: {self.config.prefill_timeout_s:.0f} s are over") from error
        except httpx.HTTPError as error:
            raise PrefillFailed("unreachable", f"{url}: {describe(error)}") from error
        return transfer_params(url, answer)

    async def _decode(self, request: Request, body: Body, headers: Mapping[str, str]) -> Response:
        url = next(self._decode_urls) + request.url.path
        timeout = httpx.Timeout(self.config.decode_timeout_s, connect=self.config.connect_timeout_s)
        upstream = self._client.build_request("POST", url, json=body, headers=headers, timeout=timeout)
        try:
            answer = await unless_gone(request, self._client.send(upstream, stream=True))
        except httpx.HTTPError as error:
            return self._decode_failed(headers["X-Request-Id"], url, error)
        passed = {name: answer.headers[name] for name in PASSED_HEADERS if name in answer.headers}
        if body.get("stream"):
            return StreamingResponse(self._relay(answer), answer.status_code, passed)
        try:
            content = await unless_gone(request, read_all(answer))
        except httpx.HTTPError as error:
            return self._decode_failed(headers["X-Request-Id"], url, error)
        return Response(content, answer.status_code, passed)

    async def _relay(self, answer: httpx.Response) -> AsyncIterator[bytes]:
        """Pieces of D's stream as they come. Leaving this generator closes the connection, and D aborts."""
        try:
            async for piece in answer.aiter_raw():
                yield piece
        except httpx.HTTPError as error:
            self.counters.decode_failures.inc()
            logger.error("D broke off its answer: %s: %s", answer.url, describe(error))
            event = error_body("decode_failed", f"{answer.url} broke off: {describe(error)}")
            yield f"data: {json.dumps(event)}\n\n".encode()
        finally:
            await answer.aclose()

    def _decode_failed(self, request_id: str, url: str, error: httpx.HTTPError) -> Response:
        self.counters.decode_failures.inc()
        logger.error("request %s: D failed: %s: %s", request_id, url, describe(error))
        return error_response(502, "decode_unavailable", f"no answer from {url}: {describe(error)}")


async def read_all(answer: httpx.Response) -> bytes:
    """The whole body of a streamed answer, which is closed in any case."""
    try:
        return b"".join([piece async for piece in answer.aiter_raw()])
    finally:
        await answer.aclose()


def transfer_params(url: str, answer: httpx.Response) -> Body:
    """P's `kv_transfer_params`; PrefillFailed when the answer is an error or has none."""
    if answer.is_error:
        raise PrefillFailed("refused", f"{url}: HTTP {answer.status_code}: {answer.text[:200]}")
    try:
        params = answer.json().get("kv_transfer_params")
    except (ValueError, AttributeError) as error:
        raise PrefillFailed("no_params", f"{url}: the answer is not a JSON object") from error
    if not isinstance(params, dict) or not params:
        raise PrefillFailed("no_params", f"{url}: the answer has no kv_transfer_params")
    return params


async def unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled when the client disconnects first (ClientGone)."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnect_of(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def disconnect_of(request: Request) -> None:
    """Return when the client has closed its connection. The request's body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def node_headers(request: Request) -> dict[str, str]:
    """Headers for both nodes: one request id, the client's if it sent one, and its authorization."""
    headers = {"X-Request-Id": request.headers.get("x-request-id") or uuid.uuid4().hex}
    if "authorization" in request.headers:
        headers["Authorization"] = request.headers["authorization"]
    return headers


def describe(error: Exception) -> str:
    """A short text for an error whose own text may be empty."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def error_body(kind: str, message: str) -> Body:
    """An error in the form of OpenAI's API."""
    return {"error": {"type": kind, "message": message}}


def error_response(status: int, kind: str, message: str) -> Response:
    """An HTTP answer that holds an error in the form of OpenAI's API."""
    return JSONResponse(error_body(kind, message), status)


def build_app(config: ProxyConfig) -> FastAPI:
    """The ASGI application. Its HTTP client lives as long as the application runs."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # Idle connections end before the nodes end them (uvicorn: 5 s): a request must not meet a closed one.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0)
        headers = {"Accept-Encoding": "identity"}  # answers are passed on byte by byte
        async with httpx.AsyncClient(limits=limits, headers=headers, trust_env=False) as client:
            app.state.proxy = Proxy(config, client)
            yield

    def proxy() -> Proxy:
        found: Proxy = app.state.proxy
        return found

    async def generate(request: Request) -> Response:
        return await proxy().generate(request)

    async def models() -> Response:
        return await proxy().models()

    async def metrics() -> Response:
        return Response(generate_latest(proxy().counters.registry), media_type="text/plain; version=0.0.4")

    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    routes: list[tuple[str, str, Callable[..., Awaitable[Response]]]] = [
        ("POST", "/v1/completions", generate),
        ("POST", "/v1/chat/completions", generate),
        ("GET", "/v1/models", models),
        ("GET", "/metrics", metrics),
        ("GET", "/health", health),
    ]
    for method, path, endpoint in routes:
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    return app


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Timeouts default to those of ProxyConfig."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.proxy", description="OpenAI proxy for prefill and decode nodes."
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    parser.add_argument("--prefill", nargs="*", default=[], metavar="URL", help="prefill nodes, round robin")
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL", help="decode nodes, round robin")
    parser.add_argument("--connect-timeout-s", type=float, default=5.0, help="(default: %(default)s)")
    parser.add_argument("--prefill-timeout-s", type=float, default=120.0, help="(default: %(default)s)")
    parser.add_argument("--decode-timeout-s", type=float, default=300.0, help="(default: %(default)s)")
    return parser.parse_args(arguments)


def main() -> None:
    """Serve until SIGTERM or Ctrl-C."""
    options = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        config = ProxyConfig(
            prefill_urls=tuple(url.rstrip("/") for url in options.prefill),
            decode_urls=tuple(url.rstrip("/") for url in options.decode),
            connect_timeout_s=options.connect_timeout_s,
            prefill_timeout_s=options.prefill_timeout_s,
            decode_timeout_s=options.decode_timeout_s,
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    uvicorn.run(build_app(config), host=options.host, port=options.port, access_log=False)


if __name__ == "__main__":
    main()
