"""Runs one vLLM engine in this process on a fixed workload: `python vllm_node.py JSON`.

JSON: {"model", "engine" (arguments of vllm.LLM), "rounds": [[prompt token ids, ...], ...], "max_tokens", "output"}.
Writes to the path "output", as JSON: "tokens" of each prompt of each round, and per rank "most_rows" (the largest
number of rows its model computed in one step) and "page_shape" (of the first layer's cache).
"""

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams


def watch_rows(worker: Any) -> None:
    """Runs in each worker: notes the most rows its model is given."""
    worker.most_rows = 0

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        worker.most_rows = max(worker.most_rows, len(kwargs["input_ids"]))

    worker.model_runner.model.register_forward_pre_hook(note, with_kwargs=True)


def report(worker: Any) -> dict[str, Any]:
    """Runs in each worker."""
    return {"most_rows": worker.most_rows, "page_shape": list(worker.model_runner.kv_caches[0].shape)}


def main() -> None:
    task = json.loads(sys.argv[1])
    llm = LLM(model=task["model"], **task["engine"])
    llm.collective_rpc(watch_rows)
    sampling = SamplingParams(temperature=0.0, max_tokens=task["max_tokens"], ignore_eos=True, detokenize=False)
    tokens = []
    for prompts in task["rounds"]:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        tokens.append([list(output.outputs[0].token_ids) for output in outputs])
    Path(task["output"]).write_text(json.dumps({"tokens": tokens, "ranks": llm.collective_rpc(report)}))


if __name__ == "__main__":
    main()
