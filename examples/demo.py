"""Shows prefill and decode nodes with different layouts at work, and that they answer like one plain vLLM.

Starts a prefill node (PCP=2, 16-token blocks), a decode node (PCP=2, DCP=2, 32-token blocks) and the proxy,
sends prompts of known length one after another, then sends the same prompts to one stock vLLM server. Prints
what moved for each. Exit code 0 only if every text is equal and every byte that moved was payload.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx

from examples.checkpoint import CheckpointUnavailable, ensure_checkpoint
from examples.completions import MODEL_NAME, Answer, Ask, complete, new_client
from examples.metrics import LoadMeter, LoadNumbers
from examples.nodes import (
    CPU_NODE_ENV,
    LOCALHOST,
    Node,
    NodeFailed,
    ProgressLine,
    exit_on_signals,
    free_ports,
    running,
)
from examples.prompts import PromptWriter
from examples.report import Row, format_table, kv_bytes_per_token, print_verdict

EXAMPLES = Path(__file__).resolve().parent
ROOT = EXAMPLES.parent
MAX_MODEL_LEN = 2048
START_TIMEOUT_S = 600.0


def main() -> int:
    """Run the demo and give its exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description="See `make demo`.")
    parser.add_argument("--logs", type=Path, default=ROOT / "logs" / "demo", help="(default: %(default)s)")
    options = parser.parse_args()
    exit_on_signals()
    try:
        return run(options.logs)
    except KeyboardInterrupt:
        print("\ninterrupted; all nodes are stopped", file=sys.stderr)
        return 130
    except (CheckpointUnavailable, NodeFailed) as error:
        print(f"\nerror: {error}", file=sys.stderr)
    except httpx.HTTPError as error:
        print(f"\nerror: {type(error).__name__}: {error}; logs are in {options.logs}", file=sys.stderr)
    return 1


def run(logs: Path) -> int:
    """All of the demo: checkpoint, two kinds of serving, table, verdict."""
    began = time.monotonic()
    print("Model: SmolLM2-135M-Instruct in float32", flush=True)
    checkpoint = ensure_checkpoint()
    asks = list_asks(PromptWriter(checkpoint))
    for stale in logs.glob("*.log"):
        stale.unlink()
    served = ask_disaggregated(checkpoint, asks, logs)
    plain = ask_plain(checkpoint, asks, logs)
    rows = [Row(ask, answer, load, text) for ask, (answer, load), text in zip(asks, served, plain, strict=True)]
    print(format_table(rows))
    print()
    code = print_verdict(rows, kv_bytes_per_token(checkpoint))
    print(f"{time.monotonic() - began:.0f} s in all; logs in {logs}")
    return code


def list_asks(writer: PromptWriter) -> list[Ask]:
    """Six prompts, two of them twice, so that D has a part of them already."""
    capital = writer.of("The capital of France is")
    lighthouse, mill = writer.cut("lighthouse", 16), writer.cut("mill", 33)
    station, bridge = writer.cut("station", 200), writer.cut("old bridge", 700)
    observatory = writer.cut("observatory", 1500)
    return [
        Ask(capital),
        Ask(lighthouse, stream=False),
        Ask(mill),
        Ask(station),
        Ask(bridge),
        Ask(observatory),
        Ask(station),
        Ask(bridge),
    ]


def ask_disaggregated(checkpoint: Path, asks: Sequence[Ask], logs: Path) -> list[tuple[Answer, LoadNumbers]]:
    """Answers through the proxy, each with what D counted meanwhile."""
    prefill_port, prefill_kv, decode_port, decode_kv, proxy_port = free_ports(5)
    prefill = weave_node("prefill", checkpoint, logs, prefill_port, prefill_kv, PCP="2", BLOCK_SIZE="16")
    decode = weave_node(
        "decode", checkpoint, logs, decode_port, decode_kv, PCP="2", DCP="2", BLOCK_SIZE="32", INTERLEAVE="32"
    )
    proxy = proxy_node(prefill, decode, logs, proxy_port)
    results = []
    with running([prefill, decode, proxy], START_TIMEOUT_S, start_report()), new_client() as client:
        meter = LoadMeter(client, decode.url)
        for ask in announced(asks):
            meter.begin()
            answer = complete(client, proxy.url, ask)
            results.append((answer, meter.finish()))
    return results


def ask_plain(checkpoint: Path, asks: Sequence[Ask], logs: Path) -> list[str]:
    """Texts of one stock vLLM server: no plugins, one rank."""
    (port,) = free_ports(1)
    node = plain_node(checkpoint, logs, port)
    with running([node], START_TIMEOUT_S, start_report()), new_client() as client:
        return [complete(client, node.url, ask).text for ask in announced(asks)]


def announced(asks: Sequence[Ask]) -> Iterator[Ask]:
    """The requests one by one, each named on the screen before it is sent."""
    line = ProgressLine(every_s=0.0)
    for number, ask in enumerate(asks, start=1):
        line.show(f"request {number} of {len(asks)}: {ask.prompt.num_tokens} prompt tokens")
        yield ask
    line.finish(f"{len(asks)} requests answered")


def weave_node(role: str, checkpoint: Path, logs: Path, port: int, kv_port: int, **layout: str) -> Node:
    """A prefill or decode node, started by the launch script that deployments use."""
    env = {
        **CPU_NODE_ENV,
        "PYTHON": sys.executable,
        "DEVICE": "cpu",
        "MODEL": str(checkpoint),
        "SERVED_NAME": MODEL_NAME,
        "HOST": LOCALHOST,
        "PORT": str(port),
        "KV_HOST": LOCALHOST,
        "KV_PORT": str(kv_port),
        "KV_CACHE_GB": "1",
        "DTYPE": "float32",
        "MAX_MODEL_LEN": str(MAX_MODEL_LEN),
        **layout,
    }
    command = [str(EXAMPLES / f"launch_{role}.sh")]
    return Node(role, command, env, logs / f"{role}.log", url=f"http://{LOCALHOST}:{port}")


def plain_node(checkpoint: Path, logs: Path, port: int) -> Node:
    """A stock vLLM server for comparison."""
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--host", LOCALHOST, "--port", str(port)),
        *("--model", str(checkpoint), "--served-model-name", MODEL_NAME, "--dtype", "float32"),
        *("--max-model-len", str(MAX_MODEL_LEN), "--enforce-eager"),
    ]
    env = {**CPU_NODE_ENV, "VLLM_PLUGINS": "", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return Node("plain", command, env, logs / "plain.log", url=f"http://{LOCALHOST}:{port}")


def proxy_node(prefill: Node, decode: Node, logs: Path, port: int) -> Node:
    """The proxy in front of one node of each kind."""
    command = [
        *(sys.executable, "-m", "examples.proxy", "--host", LOCALHOST, "--port", str(port)),
        *("--prefill", prefill.url, "--decode", decode.url),
    ]
    env = {"PYTHONPATH": str(ROOT)}
    return Node("proxy", command, env, logs / "proxy.log", url=f"http://{LOCALHOST}:{port}")


def start_report() -> Callable[[float, Sequence[Node]], None]:
    """Shows, while nodes start, which of them are still waited for."""
    line = ProgressLine()

    def report(elapsed_s: float, waiting: Sequence[Node]) -> None:
        if waiting:
            names = ", ".join(node.name for node in waiting)
            line.show(f"starting {names}: {elapsed_s:.0f} s (limit {START_TIMEOUT_S:.0f} s)")
        else:
            line.finish(f"ready after {elapsed_s:.0f} s")

    return report


if __name__ == "__main__":
    sys.exit(main())
