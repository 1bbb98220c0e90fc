"""The CPU worker with context parallelism: slot mapping of a sharded cache and rows split over the PCP ranks."""

from itertools import pairwise
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.triton_utils.dispatcher import register_kernels
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from attention.step import RowSplit
from attention.vllm.seams import require_parameters
from layouts import Interleave

SLOT_MAPPING_KERNEL = "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel"


class ContextParallelWorker(cpu_worker.CPUWorker):
    """CPUWorker with another model runner and slot mapping."""

    def init_device(self) -> None:
        """Raises SeamError when the model runner of the installed vLLM has changed."""
        register_kernels({SLOT_MAPPING_KERNEL: compute_slot_mapping})
        stock_runner = cpu_worker.CPUModelRunner
        cpu_worker.CPUModelRunner = ContextParallelModelRunner
        try:
            super().init_device()
        finally:
            cpu_worker.CPUModelRunner = stock_runner


class ContextParallelModelRunner(CPUModelRunner):
    """CPUModelRunner whose model computes only this PCP rank's rows of a step.

    Everything around the model keeps the whole batch: slot mapping before it, hidden states, logits and sampling after
    it are the same on all PCP ranks.
    """

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        require_parameters(
            CPUModelRunner._model_forward,
            *("self", "input_ids", "positions", "intermediate_tensors", "inputs_embeds", "model_kwargs"),
        )
        super().__init__(vllm_config, device)

    def _model_forward(
        self,
        input_ids: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **model_kwargs: Any,
    ) -> Any:
        split = _current_split()
        if split is None:
            return super()._model_forward(input_ids, positions, intermediate_tensors, inputs_embeds, **model_kwargs)
        hidden_states = super()._model_forward(
            None if input_ids is None else split.select(input_ids),
            None if positions is None else split.select(positions),
            intermediate_tensors,
            None if inputs_embeds is None else split.select(inputs_embeds),
            **model_kwargs,
        )
        return split.gather(hidden_states)


def _current_split() -> RowSplit | None:
    metadata = get_forward_context().attn_metadata
    return next(iter(metadata.values())).split if metadata else None


def compute_slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    slot_mapping: torch.Tensor,
    KV_CACHE_BLOCK_SIZE: int,
    TOTAL_CP_WORLD_SIZE: int = 1,
    TOTAL_CP_RANK: int = 0,
    CP_KV_CACHE_INTERLEAVE_SIZE: int = 1,
    PAD_ID: int = -1,
    BLOCK_SIZE: int = 1024,
) -> None:
    """vLLM's slot mapping kernel for a sharded cache: flat slots of all tokens of a step, -1 where not owned.

    Parameters as in vllm/v1/worker/block_table.py; writes slot_mapping [max_num_tokens] int64.
    """
    interleave = Interleave(TOTAL_CP_WORLD_SIZE, CP_KV_CACHE_INTERLEAVE_SIZE, KV_CACHE_BLOCK_SIZE)
    slots, tables, where = slot_mapping.numpy(), block_table.numpy(), positions.numpy()
    for request, (start, stop) in enumerate(pairwise(query_start_loc.tolist())):
        slots[start:stop] = interleave.slot_mapping(where[start:stop], tables[request], TOTAL_CP_RANK)
    slots[num_tokens:] = PAD_ID
