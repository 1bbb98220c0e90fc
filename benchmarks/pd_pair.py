"""WeaveConnector against vLLM's NixlConnector on two real vLLM CPU servers each: `python -m benchmarks.pd_pair`.

Both pairs serve the same model with the same flags and the same, stock pages, so that both connectors can do it. All
four servers run at once and are asked in turn, so that whatever else happens on the machine meets both alike. Measured
on the decode node: time to the first token of prompts that were prefilled before, what moved, CPU seconds of both
nodes, and how a running batch slows down while prompts arrive.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.goals import Goal, Sample, report_goals
from examples.checkpoint import ensure_checkpoint
from examples.completions import new_client
from examples.nodes import CPU_NODE_ENV, LOCALHOST, Node, NodeFailed, exit_on_signals, free_ports, running
from layouts.commands.options import integer

LENGTHS = (512, 2048)
MAX_MODEL_LEN = 4096
VOCABULARY = 40_000
START_TIMEOUT_S = 600.0
BATCH_SIZE, BATCH_TOKENS = 4, 1024
ARRIVALS = 6
MODEL = "m"

CONNECTORS: dict[str, dict[str, Any]] = {
    "weave": {"kv_connector": "WeaveConnector", "kv_connector_extra_config": {"pages": "native"}},
    "nixl": {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"},
}
MOVED = {  # (bytes, pieces, seconds) as each connector counts them
    "weave": ("vllm:kvweave_bytes_moved_total", "vllm:kvweave_segments_total", "vllm:kvweave_transfer_seconds_total"),
    "nixl": (
        "vllm:nixl_bytes_transferred_sum",
        "vllm:nixl_num_descriptors_sum",
        "vllm:nixl_xfer_time_seconds_sum",
    ),
}


@dataclass(frozen=True, slots=True)
class Load:
    """One prompt that was prefilled on P and is answered by D."""

    first_token_s: float
    num_bytes: float
    num_pieces: float
    transfer_s: float
    cpu_s: float


class Pair:
    """A prefill and a decode node with one connector."""

    def __init__(self, connector: str, model: Path, logs: Path, extra: dict[str, Any]) -> None:
        self.connector = connector
        self.prefill, self.decode = (_node(connector, role, model, logs, extra) for role in ("prefill", "decode"))
        self._client = new_client()

    def prefilled(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Computes a prompt on P; returns the params for D."""
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        body = _body(prompt, params, max_tokens=1)
        answer = self._client.post(f"{self.prefill.url}/v1/completions", json=body).raise_for_status().json()
        handed_on: dict[str, Any] = answer["kv_transfer_params"]
        return handed_on

    def measure(self, prompt: Sequence[int]) -> Load:
        """Prefills a prompt, then times D's first token and waits until both nodes have counted."""
        params = self.prefilled(prompt)
        before, cpu_before = self._moved(), self._cpu_s()
        first_token_s = self.first_token_s(prompt, params)
        time.sleep(1.0)
        num_bytes, num_pieces, transfer_s = (b - a for a, b in zip(before, self._moved(), strict=True))
        return Load(first_token_s, num_bytes, num_pieces, transfer_s, self._cpu_s() - cpu_before)

    def first_token_s(self, prompt: Sequence[int], params: dict[str, Any]) -> float:
        """Seconds from the request to D until its first token."""
        began = time.perf_counter()
        times = list(self._tokens(_body(prompt, params, max_tokens=2)))
        return times[0] - began

    @contextmanager
    def running_batch(self) -> Iterator[list[float]]:
        """Context in which D decodes a batch; gives the times of its tokens, as they come."""
        times: list[float] = []
        generator = random.Random(0)

        def decode() -> None:
            body = _body(_prompt(generator, 64), None, max_tokens=BATCH_TOKENS)
            for moment in self._tokens(body, stop):  # one by one: others watch the list grow
                times.append(moment)

        stop = threading.Event()
        threads = [threading.Thread(target=decode) for _ in range(BATCH_SIZE)]
        for thread in threads:
            thread.start()
        while len(times) < 4 * BATCH_SIZE:
            time.sleep(0.05)
        try:
            yield times
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def _tokens(self, body: dict[str, Any], stop: threading.Event | None = None) -> Iterator[float]:
        """The time of each token of a streamed completion on D."""
        with (
            new_client() as client,
            client.stream("POST", f"{self.decode.url}/v1/completions", json={**body, "stream": True}) as response,
        ):
            response.raise_for_status()
            for line in response.iter_lines():
                if stop is not None and stop.is_set():
                    return
                if line.startswith("data: {"):
                    if "error" in (event := json.loads(line.removeprefix("data: "))):
                        raise httpx.RemoteProtocolError(str(event["error"]))
                    yield time.perf_counter()

    def _moved(self) -> tuple[float, float, float]:
        page = self._client.get(f"{self.decode.url}/metrics").raise_for_status().text
        sums = dict.fromkeys(MOVED[self.connector], 0.0)
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name in sums:
                    sums[sample.name] += sample.value
        num_bytes, num_pieces, seconds = sums.values()
        return num_bytes, num_pieces, seconds

    def _cpu_s(self) -> float:
        total = 0.0
        for node in (self.prefill, self.decode):
            first = psutil.Process(node.pid)
            for process in (first, *first.children(recursive=True)):
                times = process.cpu_times()
                total += times.user + times.system
        return total


def _node(connector: str, role: str, model: Path, logs: Path, extra: dict[str, Any]) -> Node:
    port, side_channel = free_ports(2)
    config = {**CONNECTORS[connector], "kv_role": "kv_both"}
    if connector == "weave":
        config["kv_connector_extra_config"] = config["kv_connector_extra_config"] | extra
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", MODEL, "--host", LOCALHOST, "--port", str(port), "--dtype", "float32"),
        *("--max-model-len", str(MAX_MODEL_LEN), "--enforce-eager", "--no-enable-prefix-caching"),
        *("--kv-transfer-config", json.dumps(config)),
    ]
    env = {
        **CPU_NODE_ENV,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": LOCALHOST,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel),
    }
    name = f"{connector}-{role}"
    return Node(name, command, env, logs / f"{name}.log", url=f"http://{LOCALHOST}:{port}")


def _body(prompt: Sequence[int], params: dict[str, Any] | None, max_tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "kv_transfer_params": params,
    }


def _prompt(generator: random.Random, num_tokens: int) -> list[int]:
    return [generator.randrange(100, VOCABULARY) for _ in range(num_tokens)]


def measure_loads(pairs: Sequence[Pair], num_tokens: int, rounds: int) -> dict[str, list[Load]]:
    """Loads of `num_tokens` tokens, each prompt with every pair, in alternating order; the first does not count."""
    generator = random.Random(num_tokens)
    loads: dict[str, list[Load]] = {pair.connector: [] for pair in pairs}
    for round_number in range(rounds + 1):
        prompt = _prompt(generator, num_tokens)
        for pair in pairs if round_number % 2 else reversed(pairs):
            load = pair.measure(prompt)
            if round_number:
                loads[pair.connector].append(load)
    return loads


def measure_slowdown(pair: Pair, seed: int) -> float:
    """Tokens per second of a running batch while prompts arrive, relative to the same batch left alone."""
    generator = random.Random(seed)
    prompts = [_prompt(generator, LENGTHS[-1]) for _ in range(ARRIVALS)]
    params = [pair.prefilled(prompt) for prompt in prompts]
    with pair.running_batch() as times:
        alone = _rate_while(times, lambda: time.sleep(3.0))
        disturbed = _rate_while(
            times, lambda: [pair.first_token_s(*arrival) for arrival in zip(prompts, params, strict=True)]
        )
    return disturbed / alone


def _rate_while(times: list[float], action: Any) -> float:
    """Tokens per second that come while `action` runs."""
    began, count = time.perf_counter(), len(times)
    action()
    return (len(times) - count) / (time.perf_counter() - began)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table, and with --check one line per goal; exit code 1 on a miss."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pd_pair", description=__doc__)
    parser.add_argument("--rounds", type=integer(1, 1000), default=9, metavar="N", help="loads of each length (9)")
    parser.add_argument("--transport", default="auto", help="transport of WeaveConnector (auto)")
    parser.add_argument("--logs", type=Path, default=Path("logs/pd_pair"), help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--check", action="store_true", help="compare with the goals")
    options = parser.parse_args(arguments)
    exit_on_signals()
    try:
        return run(options)
    except NodeFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def run(options: argparse.Namespace) -> int:
    """Starts both pairs, measures, reports."""
    model = ensure_checkpoint()
    pairs = [Pair(name, model, options.logs, {"transport": options.transport}) for name in CONNECTORS]
    configuration = {"model": model.name, "rounds": options.rounds, "transport": options.transport}
    print("configuration", json.dumps(configuration))
    with running([node for pair in pairs for node in (pair.prefill, pair.decode)], START_TIMEOUT_S):
        loads = {length: measure_loads(pairs, length, options.rounds) for length in LENGTHS}
        slowdowns: dict[str, list[float]] = {pair.connector: [] for pair in pairs}
        for round_number in range(options.rounds):
            for pair in pairs if round_number % 2 else reversed(pairs):
                slowdowns[pair.connector].append(measure_slowdown(pair, round_number))
    for length, by_connector in loads.items():
        for connector, of_connector in by_connector.items():
            columns = {name: Sample.of([getattr(load, name) for load in of_connector]) for name in Load.__slots__}
            print(f"{length:6} tokens {connector:6} " + "  ".join(f"{name} {of}" for name, of in columns.items()))
    for connector, ratios in slowdowns.items():
        print(f"running batch while prompts arrive, tokens/s relative to alone: {connector:6} {Sample.of(ratios)}")
    if options.json:
        figures = {
            "configuration": configuration,
            "loads": {n: {c: [asdict(x) for x in of] for c, of in by.items()} for n, by in loads.items()},
            "slowdowns": slowdowns,
        }
        options.json.write_text(json.dumps(figures, indent=1))
    return report_goals(goals_of(loads, slowdowns)) if options.check else 0


def goals_of(loads: dict[int, dict[str, list[Load]]], slowdowns: dict[str, list[float]]) -> list[Goal]:
    """No later first token than with NixlConnector, and no slower batch."""
    goals = []
    for length, by in loads.items():
        ours, theirs = ([load.first_token_s for load in by[name]] for name in ("weave", "nixl"))
        ratio = Sample.of([a / b for a, b in zip(ours, theirs, strict=True)])
        goals.append(Goal(f"first token at {length} tokens, of NixlConnector's time", ratio.median, "<=", 1.0))
    ratio = Sample.of([a / b for a, b in zip(slowdowns["weave"], slowdowns["nixl"], strict=True)])
    goals.append(Goal("batch speed while prompts arrive, of NixlConnector's", ratio.median, ">=", 1.0))
    return goals


if __name__ == "__main__":
    sys.exit(main())
