"""Runs a function on several gloo ranks, each a process of its own."""

import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(num_ranks: int, function: Callable[..., None], *arguments: Any) -> None:
    """Calls `function(rank, group, *arguments)` on every rank; an exception on any of them is raised here."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["attention.prefill"])
    with (
        tempfile.TemporaryDirectory() as directory,
        ProcessPoolExecutor(num_ranks, mp_context=context) as pool,
    ):
        store = str(Path(directory) / "store")
        futures = [pool.submit(_run_rank, rank, num_ranks, store, function, arguments) for rank in range(num_ranks)]
        for future in futures:
            future.result(timeout=60)


def _run_rank(rank: int, num_ranks: int, store: str, function: Callable[..., None], arguments: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    try:
        function(rank, dist.group.WORLD, *arguments)
    finally:
        dist.destroy_process_group()
