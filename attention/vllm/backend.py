"""vLLM attention backend on plain pages [num_blocks, H, N, 2 D] (keys then values of each token), with DCP and PCP.

Takes the place of CPU_ATTN and keeps its name, because vLLM looks the name up in its registry.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_dcp_group, get_pcp_group
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from attention.entries import KeyValue, PagedCache
from attention.local import LocalBatch, plan_local
from attention.queries import QueryExchange, attend_shared
from attention.step import RowSplit, split_rows
from layouts import Interleave
from layouts.errors import config_error


class PlainPageBackend(AttentionBackend):
    """Any block size, head size and floating-point type; causal decoder attention over all tokens."""

    kv_page_format = "plain"
    """Read by KV connectors: a token of a head is contiguous, so pages can be cut at any token."""
    forward_includes_kv_cache_update = False
    supported_dtypes = [torch.float32, torch.bfloat16, torch.float16]  # noqa: RUF012 - vLLM's declaration
    supported_kv_cache_dtypes = ["auto"]  # noqa: RUF012

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> "type[PlainPageImpl]":
        return PlainPageImpl

    @staticmethod
    def get_builder_cls() -> "type[PlainPageMetadataBuilder]":
        return PlainPageMetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Any would do. With blocks outermost a block's layers are adjacent, so that a KV connector moves them in one
        piece."""
        return (KVCacheLayout.BLHNC, KVCacheLayout.LBHNC)


@dataclass(frozen=True, slots=True)
class PlainPageMetadata(AttentionMetadata):
    """One step, shared by all layers. `split` is set when this step's rows are divided over the PCP ranks, `exchange`
    when the cache is sharded."""

    block_table: torch.Tensor
    batch: LocalBatch
    split: RowSplit | None
    exchange: QueryExchange | None


class PlainPageMetadataBuilder(AttentionMetadataBuilder[PlainPageMetadata]):
    """Plans the rows of a step once, for all layers."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        parallel = vllm_config.parallel_config
        self._splits_rows = parallel.prefill_context_parallel_size > 1
        self._num_shards = parallel.decode_context_parallel_size
        self._shard = get_dcp_group().rank_in_group if self._num_shards > 1 else 0
        self._interleave = Interleave(self._num_shards, parallel.cp_kv_cache_interleave_size, kv_cache_spec.block_size)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PlainPageMetadata:
        query_lens = np.diff(common_attn_metadata.query_start_loc_cpu.numpy()).astype(np.int64)
        contexts = common_attn_metadata.seq_lens.numpy().astype(np.int64) - query_lens
        split: RowSplit | None = None
        rows: Sequence[np.ndarray] = [np.arange(length) for length in query_lens]
        if self._splits_rows:
            split, own_rows = split_rows(query_lens.tolist(), get_pcp_group().device_group)
            if self._num_shards == 1:  # a whole cache: own rows attend alone
                rows = own_rows
        positions = [
            np.where(of_request < 0, of_request, of_request + context)
            for of_request, context in zip(rows, contexts, strict=True)
        ]
        return PlainPageMetadata(
            block_table=common_attn_metadata.block_table_tensor,
            batch=plan_local(positions, self._interleave, self._shard),
            split=split,
            exchange=self._exchange(split),
        )

    def _exchange(self, split: RowSplit | None) -> QueryExchange | None:
        """How rows reach all keys: the cache is whole, or sharded over the PCP ranks, or inside the TP group."""
        if self._num_shards == 1:
            return None
        return QueryExchange(get_dcp_group().device_group, split, 1 if self._splits_rows else self._num_shards)


class PlainPageImpl(AttentionImpl[PlainPageMetadata]):
    """Attention of one layer."""

    can_return_lse_for_decode = True
    supports_dcp = True
    supports_pcp = True
    supports_mtp_with_cp_non_trivial_interleave_size = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        if alibi_slopes is not None or logits_soft_cap:
            raise config_error(
                "attention layer on plain pages",
                got="ALiBi slopes" if alibi_slopes is not None else f"a logits soft cap of {logits_soft_cap}",
                allowed="neither",
                remedy="Run this model without context parallelism and without WeaveConnector.",
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PlainPageMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query and output [rows, heads, D]; kv_cache [num_blocks, KV heads, N, 2 D] has key and value already."""
        if attn_metadata is None:  # a profiling run
            return output.zero_()
        metadata = attn_metadata
        cache = PagedCache(kv_cache, KeyValue(self.head_size, self.head_size))
        part = attend_shared(query, cache, metadata.block_table, metadata.batch, metadata.exchange, self.scale)
        output.copy_(part.out)
        return output

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Stores the step's tokens that belong to this rank; with split rows after gathering them."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            return
        split = metadata[layer.layer_name].split
        entries = torch.cat([key, value], dim=-1)
        cache = PagedCache(kv_cache, KeyValue(self.head_size, self.head_size))
        cache.write(slot_mapping, entries if split is None else split.gather(entries))
