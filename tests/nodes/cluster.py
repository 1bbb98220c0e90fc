"""Real vLLM nodes for tests: start one for a layout, ask it for tokens, read its counters."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.nodes import CPU_NODE_ENV, Node, free_ports

READY_TIMEOUT_S = 400
NUM_OUTPUT_TOKENS = 8
HEAD_SIZE = 32
LEASE_S = 5.0
TRANSPORT = os.environ.get("KVWEAVE_TEST_TRANSPORT", "auto")
"""What moves the bytes between all nodes: the whole matrix runs over any of them."""
MAX_BATCHED_TOKENS = 64
"""Longer prompts are prefilled in chunks."""


@dataclass(frozen=True)
class Layout:
    """The flags of one node. `policy` is its kv_load_failure_policy; `plain` means vLLM without any plugin;
    `num_blocks` is its pool, whose first block vLLM keeps for itself; `port` its control port (0: a free one)."""

    kv_heads: int = 1
    tp: int = 1
    pcp: int = 1
    dcp: int = 1
    block: int = 16
    interleave: int = 16
    policy: str = "recompute"
    plain: bool = False
    num_blocks: int = 400
    lease_s: float = LEASE_S
    port: int = 0

    @property
    def virtual_block(self) -> int:
        return self.block * self.dcp

    @property
    def max_tokens(self) -> int:
        """Longest request, which has to fit into the pool."""
        return min(2048, (self.num_blocks - 1) * self.virtual_block)

    def flags(self) -> list[str]:
        return [
            *("--tensor-parallel-size", str(self.tp)),
            *("--prefill-context-parallel-size", str(self.pcp)),
            *("--decode-context-parallel-size", str(self.dcp)),
            *("--block-size", str(self.block)),
            *("--cp-kv-cache-interleave-size", str(self.interleave)),
            *("--num-gpu-blocks-override", str(self.num_blocks)),
            *("--max-model-len", str(self.max_tokens)),
        ]

    def __str__(self) -> str:
        kind = "plain" if self.plain else "weave"
        return (
            f"{kind}-h{self.kv_heads}-tp{self.tp}-pcp{self.pcp}-dcp{self.dcp}-b{self.block}-i{self.interleave}"
            f"-{self.policy}"
        )


def plain_node(kv_heads: int) -> Layout:
    """One rank of stock vLLM, whose CPU attention wants blocks of 32."""
    return Layout(kv_heads=kv_heads, block=32, interleave=32, plain=True)


@dataclass
class Answer:
    """What a node answered: the tokens, how it finished, and the params for the next node."""

    tokens: list[int]
    finish_reason: str
    params: dict[str, Any] | None = None


@dataclass(eq=False)
class VllmNode:
    """One vLLM server over HTTP."""

    node: Node
    url: str
    layout: Layout
    _seen: dict[str, float] = field(default_factory=dict)

    def complete(
        self, prompt: Sequence[int], params: dict[str, Any] | None = None, timeout_s: float = 120, **body: Any
    ) -> Answer:
        request = {
            "model": "m",
            "prompt": list(prompt),
            "max_tokens": NUM_OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "kv_transfer_params": params,
        } | body
        answer = self._post("/v1/completions", request, timeout_s)
        choice = answer["choices"][0]
        return Answer(choice["token_ids"], choice["finish_reason"], answer.get("kv_transfer_params"))

    def prefill(self, prompt: Sequence[int], **body: Any) -> dict[str, Any]:
        """Prefill here for another node; the params to hand to it."""
        params = self.complete(prompt, {"do_remote_decode": True}, max_tokens=1, **body).params
        assert params is not None
        return params

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics: name and labels (without engine and model) -> value."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as response:
            text = response.read().decode()
        samples = {}
        for line in text.splitlines():
            if match := re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\S+)", line):
                labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
                key = [
                    match[1],
                    *(v for k, v in sorted(labels.items()) if k not in ("engine", "model_name") and v),
                ]
                samples["|".join(key)] = float(match[3])
        return samples

    def counters(self) -> dict[str, float]:
        """kvweave counters without prefix and suffix, e.g. "loads|loaded"; "bytes_moved" and "reads" over all ways."""
        found: defaultdict[str, float] = defaultdict(float)
        for key, value in self.metrics().items():
            if key.startswith("vllm:kvweave_") and "_created" not in key:
                name = re.sub(r"_total", "", key.removeprefix("vllm:kvweave_"), count=1)
                family = name.partition("|")[0]
                found[family if family in ("bytes_moved", "reads") else name] += value
        return dict(found)

    def changes(self, until: Callable[[dict[str, float]], bool], timeout_s: float = 5) -> dict[str, float]:
        """What the counters gained since the last call, once `until` holds for it."""
        deadline = time.monotonic() + timeout_s
        while True:
            now = self.counters()
            gained = {
                key: value - self._seen.get(key, 0) for key, value in now.items() if value != self._seen.get(key, 0)
            }
            if until(gained) or time.monotonic() > deadline:
                assert until(gained), f"counters after {timeout_s} s: {gained}"
                self._seen = now
                return gained
            time.sleep(0.05)

    def assert_idle(self, timeout_s: float = 5) -> None:
        """No block is held by a request, and no lease is open. The right within a bound."""
        deadline = time.monotonic() + timeout_s
        while True:
            samples, counters = self.metrics(), self.counters()
            usage = samples["vllm:kv_cache_usage_perc"]
            ended = sum(value for key, value in counters.items() if key.startswith("leases_ended"))
            open_leases = counters.get("leases_granted", 0) - ended
            running = samples["vllm:num_requests_running"] + samples["vllm:num_requests_waiting"]
            if usage == open_leases == running == 0:
                return
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.node.name}: usage {usage}, open leases {open_leases}, requests {running}")
            time.sleep(0.1)

    def _post(self, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                result: dict[str, Any] = json.load(response)
                return result
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{self.node.name} answered {error.code}: {error.read().decode()[:500]}") from error


def make_node(model: Path, layout: Layout, log_dir: Path) -> VllmNode:
    """A node that is not started yet."""
    (port,) = free_ports(1)
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", "m", "--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32"),
        *("--host", "127.0.0.1", "--port", str(port), "--max-num-seqs", "16"),
        *("--max-num-batched-tokens", str(MAX_BATCHED_TOKENS)),
        *layout.flags(),
    ]
    env = dict(CPU_NODE_ENV) | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    if layout.plain:
        env["VLLM_PLUGINS"] = ""
    else:
        config = {
            "kv_connector": "WeaveConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": layout.policy,
            "kv_connector_extra_config": {
                "model_id": model.name,
                "lease_s": layout.lease_s,
                "port": layout.port,
                "transport": TRANSPORT,
            },
        }
        command += ["--kv-transfer-config", json.dumps(config)]
    url = f"http://127.0.0.1:{port}"
    name = str(layout)
    log = log_dir / f"{name}-{port}.log"
    return VllmNode(Node(name, command, env, log, url=url), url, layout)


def hand_over(source: VllmNode, target: VllmNode, prompt: Sequence[int]) -> Answer:
    """The usual flow: prefill on one node, decode on the other."""
    return target.complete(prompt, source.prefill(prompt))


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run all calls at the same time; their results in order."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]
