"""What a token leaves in the cache, and pages of such entries. Knows nothing of ranks and shards.

An entry is one token of one KV head: key and value side by side, or the latent of multi-head latent attention. The
paths move entries and never look inside; a format turns them into keys and values where attention is computed.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from layouts import Interleave


class EntryFormat(Protocol):
    """How entries become keys and values."""

    @property
    def value_size(self) -> int:
        """Columns of the attention output."""

    @property
    def tile_tokens(self) -> int:
        """Tokens to read at a time, so that what reading allocates stays bounded."""

    def read(self, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """entries [S, Hkv, E] -> keys [H, S, K], values [H, S, >= value_size]."""


@dataclass(frozen=True, slots=True)
class KeyValue:
    """An entry is a key, then a value (grouped-query attention)."""

    key_size: int
    value_size: int
    tile_tokens: int = 4096

    def read(self, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """entries [S, Hkv, key_size + value_size]."""
        key, value = entries.transpose(0, 1).split([self.key_size, self.value_size], dim=-1)
        return key, value


@dataclass(frozen=True, slots=True)
class Latent:
    """Absorbed multi-head latent attention: the entry (latent, then rotary key) is the key of all query heads, and the
    latent, its first `value_size` elements, is their value."""

    value_size: int
    tile_tokens: int = 512

    def read(self, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """entries [S, 1, latent + rotary]. The values are left as wide as the keys: narrowing would copy them."""
        key = entries.transpose(0, 1)
        return key, key


@dataclass(frozen=True, slots=True)
class ExpandedLatent:
    """Multi-head latent attention with the keys and values of each query head, as a model's prefill computes them.

    up_key [H, N, R] and up_value [H, R, V] are the two halves of the model's up-projection; an entry is the latent (R)
    and the rotary key, which all heads share.
    """

    up_key: torch.Tensor
    up_value: torch.Tensor
    tile_tokens: int = 512

    @property
    def value_size(self) -> int:
        """V."""
        return int(self.up_value.shape[-1])

    def read(self, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """entries [S, 1, R + rotary] -> keys [H, S, N + rotary], values [H, S, V]."""
        latent, rotary = entries[:, 0].tensor_split([self.up_key.shape[-1]], dim=-1)
        key = torch.cat([latent @ self.up_key.mT, rotary.expand(len(self.up_key), *rotary.shape)], dim=-1)
        return key, latent @ self.up_value


@dataclass(frozen=True, slots=True)
class Reader:
    """Entries of one sequence as keys and values. `entries` is [S, Hkv, E]."""

    entries: torch.Tensor
    format: EntryFormat

    def __call__(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.format.read(self.entries[start:stop])


@dataclass(frozen=True, slots=True)
class PagedCache:
    """The pages of one rank and layer: [num_blocks, Hkv, B, E].

    A request's tokens fill its blocks in order; which positions these are on a shard is not known here.
    """

    pages: torch.Tensor
    format: EntryFormat

    @property
    def num_kv_heads(self) -> int:
        return int(self.pages.shape[1])

    @property
    def _plain(self) -> Interleave:
        """Tokens, or flat slots, one after the other in blocks."""
        return Interleave(1, 1, self.pages.shape[2])

    def entries(self, block_ids: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Tokens start .. stop-1 of the request with these blocks: [stop - start, Hkv, E]."""
        _, first, slot = self._plain.locate(start)
        wanted = block_ids[first : self._plain.num_virtual_blocks(stop)]
        # Indexing copies these blocks alone; index_select would first copy all pages when they are not contiguous.
        tokens = self.pages[wanted].transpose(0, 1).flatten(1, 2)
        return tokens[:, slot : slot + stop - start].transpose(0, 1)

    def write(self, slots: torch.Tensor, entries: torch.Tensor) -> None:
        """Stores entries [T, Hkv, E] at flat slots [T]; negative where another rank owns the token."""
        mine = torch.nonzero(slots >= 0).squeeze(-1)
        _, blocks, slot_in_block = self._plain.locate(slots[mine])
        self.pages[blocks, :, slot_in_block] = entries[mine]


@dataclass(frozen=True, slots=True)
class PageReader:
    """The tokens of one request in a cache, as keys and values."""

    cache: PagedCache
    block_ids: torch.Tensor

    @property
    def format(self) -> EntryFormat:
        return self.cache.format

    def __call__(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.format.read(self.cache.entries(self.block_ids, start, stop))
