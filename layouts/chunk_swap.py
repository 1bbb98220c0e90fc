"""How prefill context parallelism (PCP) splits the computation of a batch over ranks, and how outputs
come back.

Knows the new tokens of each request, by their index from 0; nothing of where KV is stored and nothing of
tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from layouts.errors import config_error, require_at_least
from layouts.interleave import IntArray

PADDING = -1
"""Index of a padding token in the flat batch."""


@dataclass(frozen=True, slots=True)
class ChunkSwap:
    """The split of one batch. Build it with `chunk_swap`.

    Orders of tokens: the *flat batch* has the new tokens of all requests, request after request. The
    *padded batch* has `padded_lens` tokens per request, its real ones first. The *gathered batch* is what
    an all-gather over the ranks gives: rank after rank, on each rank request after request.
    """

    pcp: int
    query_lens: tuple[int, ...]
    replicated: tuple[bool, ...]

    @property
    def local_lens(self) -> tuple[int, ...]:
        """Tokens of each request on each rank, padding included."""
        return tuple(
            length if whole else 2 * -(-length // (2 * self.pcp))
            for length, whole in zip(self.query_lens, self.replicated, strict=True)
        )

    @property
    def padded_lens(self) -> tuple[int, ...]:
        """Tokens of each request over all ranks, padding and copies included."""
        return tuple(self.pcp * length for length in self.local_lens)

    @property
    def num_padding(self) -> tuple[int, ...]:
        """Tokens of each request that are padding, or copies of a replicated request."""
        return tuple(padded - length for padded, length in zip(self.padded_lens, self.query_lens, strict=True))

    @property
    def restore_index(self) -> IntArray:
        """int64 [sum(padded_lens)]: where each token of the padded batch is in the gathered batch.

        `gathered[restore_index]` is the padded batch, and that indexed by `~padding_mask` the flat batch.
        """
        request, offset = self._padded_batch()
        local_lens = np.array(self.local_lens, dtype=np.int64)
        local_starts = _starts(local_lens)[request]
        whole = np.array(self.replicated, dtype=np.bool_)[request]
        chunk_len = np.where(whole, local_lens[request], local_lens[request] // 2)
        chunk = offset // chunk_len
        second_half = ~whole & (chunk >= self.pcp)
        rank = np.where(second_half, 2 * self.pcp - 1 - chunk, chunk)
        within = offset - chunk * chunk_len + np.where(second_half, chunk_len, 0)
        index: IntArray = rank * sum(self.local_lens) + local_starts + within
        return index

    @property
    def padding_mask(self) -> npt.NDArray[np.bool_]:
        """bool [sum(padded_lens)]: tokens of the padded batch that are padding, or copies after the first."""
        request, offset = self._padded_batch()
        return offset >= np.array(self.query_lens, dtype=np.int64)[request]

    def rank_positions(self, rank: int) -> list[IntArray]:
        """For each request the indices of a rank's tokens among the request's new tokens.

        int64 [local_lens[i]] each; padding goes on counting: its indices are >= query_lens[i].
        """
        request, offset = self._padded_batch()
        own = self._own_part(self._copied(request, offset), rank)
        return np.split(own, np.cumsum(self.local_lens)[:-1]) if self.query_lens else []

    def rank_indices(self, rank: int) -> IntArray:
        """int64 [sum(local_lens)]: the indices of a rank's tokens in the flat batch, -1 for padding."""
        request, offset = self._padded_batch()
        query_lens = np.array(self.query_lens, dtype=np.int64)
        offset = self._copied(request, offset)
        flat = np.where(offset < query_lens[request], _starts(query_lens)[request] + offset, PADDING)
        return self._own_part(flat, rank)

    def _padded_batch(self) -> tuple[IntArray, IntArray]:
        """(request, offset in its padded tokens) of each token of the padded batch."""
        padded_lens = np.array(self.padded_lens, dtype=np.int64)
        request = np.repeat(np.arange(len(padded_lens), dtype=np.int64), padded_lens)
        return request, np.arange(len(request), dtype=np.int64) - _starts(padded_lens)[request]

    def _copied(self, request: IntArray, offset: IntArray) -> IntArray:
        """Offsets with those of later copies of a replicated request replaced by the token they copy."""
        copied_lens = np.where(self.replicated, self.query_lens, self.padded_lens).astype(np.int64)
        wrapped: IntArray = offset % copied_lens[request]
        return wrapped

    def _own_part(self, padded_batch: IntArray, rank: int) -> IntArray:
        """A rank's part of the gathered batch, from values in the order of the padded batch."""
        if not 0 <= rank < self.pcp:
            raise config_error(
                "PCP rank",
                got=rank,
                allowed=f"0 to {self.pcp - 1}",
                remedy="Pass the rank inside the PCP group.",
            )
        gathered = np.empty_like(padded_batch)
        gathered[self.restore_index] = padded_batch
        num_local = sum(self.local_lens)
        return gathered[rank * num_local : (rank + 1) * num_local]


def chunk_swap(query_lens: Sequence[int], pcp: int, decodes: Sequence[bool] | None = None) -> ChunkSwap:
    """Splits the new tokens of each request over `pcp` ranks so that causal attention costs each the same.

    A request of n tokens is padded to a multiple of 2 * PCP and cut in 2 * PCP chunks; rank r takes
    chunks r and 2 * PCP - 1 - r (vLLM's DualChunkSwap, `vllm/v1/worker/gpu/pcp_manager.py`). Requests of
    fewer than 2 * PCP tokens and decodes are replicated: every rank has all their tokens. With one rank
    nothing is padded.

    Args:
        query_lens: new tokens of each request, 0 or more.
        pcp: number of ranks.
        decodes: which requests are decodes; needed where those have 2 * PCP tokens or more (speculation).

    Raises:
        ConfigError: pcp below 1, a negative length, or `decodes` of another length than `query_lens`.
    """
    require_at_least(1, pcp=pcp)
    for length in query_lens:
        require_at_least(0, query_lens=length)
    if decodes is None:
        decodes = [False] * len(query_lens)
    if len(decodes) != len(query_lens):
        raise config_error(
            "decodes",
            got=f"{len(decodes)} entries",
            allowed=f"one per request, {len(query_lens)}",
            remedy="Pass one flag per entry of query_lens.",
        )
    replicated = tuple(
        bool(decode) or pcp == 1 or length < 2 * pcp for length, decode in zip(query_lens, decodes, strict=True)
    )
    return ChunkSwap(pcp, tuple(query_lens), replicated)


def _starts(lengths: IntArray) -> IntArray:
    """Where each of several consecutive parts starts."""
    return np.cumsum(lengths) - lengths
