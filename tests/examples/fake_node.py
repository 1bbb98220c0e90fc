"""HTTP servers in threads for the proxy's tests: a scripted vLLM node, and any ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

WAIT_S = 10.0


@contextlib.contextmanager
def serve(app: FastAPI) -> Iterator[str]:
    """Serve `app` on a free port of this host; gives the base address."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()  # clients that come before the server has started wait in the backlog
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


class FakeNode:
    """A node that records what it is asked and answers as scripted.

    `params` is what it returns as kv_transfer_params, `status` its status. With `hold_answer` it answers only
    once `release` is set; a stream sends its first piece at once and the rest after `release`, or breaks off
    there with `break_stream`. `disconnected` is set when a connection ends before the answer is complete.
    """

    def __init__(self, params: dict[str, Any] | None = None) -> None:
        self.params = params
        self.status = 200
        self.hold_answer = False
        self.break_stream = False
        self.release = threading.Event()
        self.asked = threading.Event()
        self.disconnected = threading.Event()
        self.requests: list[tuple[str, dict[str, Any], str]] = []
        self.app = FastAPI()
        for path in ("/v1/completions", "/v1/chat/completions"):
            self.app.add_api_route(path, self._generate, methods=["POST"], response_model=None)
        self.app.add_api_route("/v1/models", self._models, methods=["GET"], response_model=None)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """The bodies received so far."""
        return [body for _, body, _ in self.requests]

    async def _models(self) -> Response:
        return JSONResponse({"data": [{"id": "fake"}]})

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append((request.url.path, body, request.headers["x-request-id"]))
        self.asked.set()
        if body.get("stream"):
            return StreamingResponse(self._pieces(), media_type="text/event-stream")
        if self.hold_answer and not await self._released(request):
            return Response()
        answer = {"text": "hello", "kv_transfer_params": self.params}
        return JSONResponse(answer, self.status)

    async def _pieces(self) -> AsyncIterator[bytes]:
        complete = False
        try:
            yield b"data: one\n\n"
            if self.break_stream:
                raise ConnectionAbortedError("scripted")
            while not self.release.is_set():
                await asyncio.sleep(0.01)
            yield b"data: two\n\n"
            complete = True
        finally:
            if not complete:
                self.disconnected.set()

    async def _released(self, request: Request) -> bool:
        while not self.release.is_set():
            if await request.is_disconnected():
                self.disconnected.set()
                return False
            await asyncio.sleep(0.01)
        return True
