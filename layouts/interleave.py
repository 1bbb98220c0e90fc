"""Where one position of a request lives when its sequence is spread over shards.

Knows positions, shards, blocks and slots; nothing of ranks, heads, layers, memory or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from layouts.errors import config_error, divisors, listed, require_at_least

IntArray = npt.NDArray[np.int64]
Ints = TypeVar("Ints", int, IntArray)
"""An int, or an int64 array that is treated element by element."""

NOT_OWNED = -1
"""The flat slot of a position that another shard stores: "do not write"."""


@dataclass(frozen=True, slots=True)
class Interleave:
    """The bijection position <-> (shard, block, slot).

    `interleave_tokens` (I) consecutive positions go to one shard before the next of `num_shards` (W)
    takes its turn; each shard packs its positions into blocks of `block_tokens` (B). One *virtual block*
    is W * B consecutive positions: one block index, one physical block on every shard. This is vLLM's
    slot mapping for decode context parallelism (`vllm/v1/worker/block_table.py`). Blocks are indices into
    a request's block table, never physical block ids.

    With one shard there is nothing to interleave: positions fill plain blocks whatever
    `interleave_tokens` is.

    Raises:
        ConfigError: a size below 1, or more than one shard and I does not divide B.
    """

    num_shards: int
    interleave_tokens: int
    block_tokens: int

    def __post_init__(self) -> None:
        require_at_least(
            1,
            num_shards=self.num_shards,
            interleave_tokens=self.interleave_tokens,
            block_tokens=self.block_tokens,
        )
        if self.num_shards > 1 and self.block_tokens % self.interleave_tokens:
            raise config_error(
                f"interleave_tokens with block_tokens={self.block_tokens} and num_shards={self.num_shards}",
                got=self.interleave_tokens,
                allowed=f"the divisors of block_tokens, {listed(divisors(self.block_tokens))}",
                remedy="Choose one of these: any other puts tokens outside their block (with block_tokens=4, "
                "num_shards=2, interleave_tokens=3 position 6 lands in slot 4 of a 4-slot block).",
            )

    @property
    def virtual_block_tokens(self) -> int:
        """Positions that share one block index: W * B."""
        return self.num_shards * self.block_tokens

    @property
    def run_tokens(self) -> int:
        """Positions between cuts: each multiple of this, and nothing else, starts a new shard or block."""
        return self.block_tokens if self.num_shards == 1 else self.interleave_tokens

    def owner(self, position: Ints) -> Ints:
        """The shard that stores a position."""
        return (position // self.interleave_tokens) % self.num_shards

    def locate(self, position: Ints) -> tuple[Ints, Ints, Ints]:
        """(shard, block_index, slot) of a position >= 0; `position` is the inverse."""
        turn_tokens = self.interleave_tokens * self.num_shards
        block = position // self.virtual_block_tokens
        offset = position - block * self.virtual_block_tokens
        turn = offset // turn_tokens
        offset -= turn * turn_tokens
        shard = offset // self.interleave_tokens
        offset -= shard * self.interleave_tokens
        offset += turn * self.interleave_tokens
        return shard, block, offset

    def position(self, shard: Ints, block_index: Ints, slot: Ints) -> Ints:
        """The position stored at (shard, block_index, slot); `locate` is the inverse."""
        turn = slot // self.interleave_tokens
        start = block_index * self.virtual_block_tokens + shard * self.interleave_tokens
        return start + slot + turn * self.interleave_tokens * (self.num_shards - 1)

    def num_local_tokens(self, num_tokens: Ints, shard: int) -> Ints:
        """How many of the positions 0 .. num_tokens-1 a shard stores (vLLM's `get_dcp_local_seq_lens`)."""
        self._require_shard(shard)
        turn_tokens = self.interleave_tokens * self.num_shards
        turns = num_tokens // turn_tokens
        rest = num_tokens - turns * turn_tokens - shard * self.interleave_tokens
        return turns * self.interleave_tokens + _clip(rest, self.interleave_tokens)

    def num_local_blocks(self, num_tokens: Ints, shard: int) -> Ints:
        """How many blocks of a shard hold at least one of the positions 0 .. num_tokens-1."""
        return -(-self.num_local_tokens(num_tokens, shard) // self.block_tokens)

    def num_virtual_blocks(self, num_tokens: Ints) -> Ints:
        """Length of the block table of a request of `num_tokens` tokens."""
        return -(-num_tokens // self.virtual_block_tokens)

    def slot_mapping(
        self, positions: int | npt.ArrayLike, block_table: Sequence[int] | npt.ArrayLike, shard: int
    ) -> IntArray:
        """Flat slots (block id * B + slot) at which a shard stores positions.

        Args:
            positions: int64 [...], each inside the block table.
            block_table: physical block ids of the request, one per virtual block.
            shard: whose slots.

        Returns:
            int64 [...] of the shape of `positions`; -1 where another shard owns the position.

        Raises:
            ConfigError: no such shard.
            IndexError: a position outside the block table.
        """
        self._require_shard(shard)
        block_ids = np.asarray(block_table, dtype=np.int64)
        where = np.asarray(positions, dtype=np.int64)
        self._require_inside(where, len(block_ids))
        owner, block, slot = self.locate(where)
        flat = block_ids[block] * self.block_tokens + slot
        return np.where(owner == shard, flat, NOT_OWNED)

    def _require_shard(self, shard: int) -> None:
        if not 0 <= shard < self.num_shards:
            raise config_error(
                "shard",
                got=shard,
                allowed=f"0 to {self.num_shards - 1}",
                remedy="Take the shard from the placement of the rank.",
            )

    def _require_inside(self, positions: IntArray, num_blocks: int) -> None:
        num_positions = num_blocks * self.virtual_block_tokens
        if positions.size and (positions.min() < 0 or positions.max() >= num_positions):
            raise IndexError(
                f"positions {positions.min()} to {positions.max()} are not all inside the {num_positions} "
                f"positions of {num_blocks} block ids of {self.virtual_block_tokens} tokens"
            )


def _clip(value: Ints, high: int) -> Ints:
    """`value` limited to 0 .. high, for ints without the cost and type of a numpy scalar."""
    if isinstance(value, int):
        return min(max(value, 0), high)
    return np.clip(value, 0, high)
