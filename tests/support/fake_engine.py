"""An engine's control routes over HTTP, which fail as told, and a publisher that runs."""

import asyncio
from contextlib import asynccontextmanager

import anyio
from aiohttp import web


class FakeEngine:
    """Serves the control routes on a free loopback port; ``faults`` maps a path to how it fails."""

    def __init__(self):
        self.version, self.paused, self.loaded, self.calls, self.faults = "default", False, [], [], {}
        self.half_loaded, self.ended, self.broken, self.score = False, 0, [], None
        self.authorizations = set()
        self.runner = self.url = None
        self.released = asyncio.Event()
        self.hangs_at, self.hangs = None, False
        """Path of the request with which the whole process hangs, as after SIGSTOP."""

    async def start(self, port=0):
        app = web.Application(middlewares=[self._hang])
        app.router.add_get("/weight_info", self._handle)
        app.router.add_get("/is_paused", self._handle)
        app.router.add_get("/get_world_size", self._handle)
        for path in ("/pause", "/resume", "/collective_rpc", "/update_weight_version", "/afterplay/end",
                     "/inference/v1/generate"):  # fmt: skip
            app.router.add_post(path, self._handle)
        self.runner = web.AppRunner(app, shutdown_timeout=1.0)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    @property
    def port(self):
        return int(self.url.rsplit(":", 1)[1])

    async def stop(self):
        self.released.set()
        await self.runner.cleanup()

    @web.middleware
    async def _hang(self, request, handler):
        self.hangs |= request.path == self.hangs_at
        if self.hangs:
            await self.released.wait()
        return await handler(request)

    def proceed(self):
        """As SIGCONT."""
        self.hangs_at, self.hangs = None, False
        self.released.set()

    async def _handle(self, request):
        path = request.path
        self.calls.append(path)
        self.authorizations.add(request.headers.get("Authorization"))
        body = await request.json() if request.can_read_body else {}
        fault = self.faults.get(path)
        if path == "/collective_rpc" and body["method"] == "abandon_update":
            self.half_loaded = self.half_loaded and fault == "for ever"
            return web.json_response({})
        if path == "/collective_rpc" and fault in (500, "hang", "for ever"):
            self.half_loaded = True
        if path == "/collective_rpc" and self.half_loaded:
            fault = fault if fault in (404, 500, "hang") else 500
        if fault == "hang":
            await self.released.wait()
        if fault == "garbage":
            return web.Response(text="<html>")
        if isinstance(fault, int):
            return web.json_response({"error": "no"}, status=fault)
        if path == "/weight_info":
            return web.json_response({"weight_version": self.version})
        if path == "/is_paused":
            return web.json_response({"is_paused": self.paused})
        if path == "/get_world_size":
            return web.json_response({"world_size": 2})
        if path == "/pause":
            assert request.query["mode"] == "keep"
            self.paused = True
        elif path == "/resume":
            self.paused = False
            if self.half_loaded:
                self.broken.append("sampled with weights that are half loaded")
        elif path == "/afterplay/end":
            self.half_loaded, self.paused, self.version = False, False, "default"
            self.ended += 1
            self.faults.clear()
        elif path == "/inference/v1/generate":
            if self.score is None:
                return web.json_response({"error": "unknown"}, status=404)
            scores = [None, *({str(token): {"logprob": self.score}} for token in body["token_ids"][1:])]
            return web.json_response({"choices": [{}], "prompt_logprobs": scores})
        elif path == "/collective_rpc":
            assert self.paused
            assert body["method"] == "reload_weights"
            self.loaded.append(body["kwargs"]["weights_path"])
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        return web.json_response({"status": "ok"})


@asynccontextmanager
async def running(publisher):
    """The publisher with its keepers running."""
    async with publisher, anyio.create_task_group() as group:
        group.start_soon(publisher.run)
        yield publisher
        group.cancel_scope.cancel()
