"""Cache memory as strides: where a (block, head, token) of one layer lies, read from real tensors.

Knows addresses and devices; knows nothing of positions, ranks or plans. Tensors are only asked for their
shape, strides and storage, so nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from layouts import ConfigError, Holding, Span

PLAIN = "plain"
_MAX_ADDRESS = 1 << 63


@dataclass(frozen=True, slots=True)
class Region:
    """The cache of one layer on one rank; sizes and strides in bytes, heads in global numbers.

    A logical block of `block_tokens` tokens consists of one or more pages of `page_tokens` tokens, which lie
    `page_stride` apart; 0 for `page_tokens` means one page. `token_bytes` is the content of one token of one
    head. `page` is "plain", or the name of an opaque format whose (block, head) tiles move whole.
    """

    layer: int
    heads: Span
    base: int
    num_blocks: int
    block_tokens: int
    block_stride: int
    head_stride: int
    token_stride: int
    token_bytes: int
    page: str
    device: str
    page_tokens: int = 0

    def __post_init__(self) -> None:
        if self.page_tokens == 0:
            object.__setattr__(self, "page_tokens", self.block_tokens)
        for name in ("block_tokens", "page_tokens", "token_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"region {name} is {getattr(self, name)}; it must be at least 1")
        for name in ("layer", "base", "num_blocks", "block_stride", "head_stride", "token_stride"):
            if getattr(self, name) < 0:
                raise ConfigError(f"region {name} is {getattr(self, name)}; it must not be negative")
        if not 0 <= self.heads.start < self.heads.stop:
            raise ConfigError(f"region heads are {tuple(self.heads)}; they must be a non-empty range from 0")
        if self.block_tokens % self.page_tokens or self.block_stride % self.pages_per_block:
            raise ConfigError(
                f"region block of {self.block_tokens} tokens, {self.block_stride} bytes apart, does not "
                f"consist of pages of {self.page_tokens} tokens"
            )
        if self.page != PLAIN and self.token_stride != self.token_bytes:
            raise ConfigError(
                f"opaque page {self.page!r} needs (block, head) tiles in one piece, got tokens of "
                f"{self.token_bytes} bytes {self.token_stride} bytes apart"
            )
        if self.base + self.num_bytes >= _MAX_ADDRESS:
            raise ConfigError(f"region of {self.num_bytes} bytes at {self.base:#x} exceeds the address space")

    @property
    def pages_per_block(self) -> int:
        """Number of pages of one logical block."""
        return self.block_tokens // self.page_tokens

    @property
    def page_stride(self) -> int:
        """Bytes from one page to the next."""
        return self.block_stride // self.pages_per_block

    @property
    def num_heads(self) -> int:
        """Number of KV heads held."""
        return self.heads.stop - self.heads.start

    @property
    def num_bytes(self) -> int:
        """Bytes from `base` to the end of the last token, whatever lies between."""
        if self.num_blocks == 0:
            return 0
        return (
            (self.num_blocks * self.pages_per_block - 1) * self.page_stride
            + (self.num_heads - 1) * self.head_stride
            + (self.page_tokens - 1) * self.token_stride
            + self.token_bytes
        )


@dataclass(frozen=True, slots=True)
class Memory:
    """A stretch of memory to register with a transport; `device` as torch names it ("cpu", "cuda:0").

    `storage` is the torch storage that starts at `address`; only copies on other devices than the CPU need it.
    """

    address: int
    num_bytes: int
    device: str = "cpu"
    storage: Any = field(default=None, compare=False, repr=False)

    @property
    def end(self) -> int:
        """First address behind it."""
        return self.address + self.num_bytes


def region_of(tensor: Any, *, layer: int, heads: Span, page: str = PLAIN, block_tokens: int | None = None) -> Region:
    """Describe a cache tensor: a logical view [num_blocks, num_heads, tokens, content] in any memory order.

    `block_tokens` is the size of a logical block when it spans several blocks of the tensor. ConfigError when
    the view is not 4-D, its content is not in one piece, or its heads or blocks do not fit what is asked for.
    """
    if tensor.dim() != 4:
        raise ConfigError(
            f"cache of layer {layer} has shape {tuple(tensor.shape)}; needed is the 4-D view "
            "[num_blocks, num_heads, tokens, content]"
        )
    num_pages, num_heads, page_tokens, content = tensor.shape
    page_stride, head_stride, token_stride, content_stride = (
        stride * tensor.element_size() for stride in tensor.stride()
    )
    if content_stride != tensor.element_size() and content != 1:
        raise ConfigError(
            f"cache of layer {layer} has content elements {content_stride} bytes apart; "
            f"they must be adjacent ({tensor.element_size()} bytes)"
        )
    token_bytes = content * tensor.element_size()
    if page_tokens == 1:  # the stride of an axis of one means nothing
        token_stride = token_bytes
    if num_heads != heads.stop - heads.start:
        raise ConfigError(f"cache of layer {layer} has {num_heads} heads, but holds heads {tuple(heads)}")
    logical_tokens = block_tokens or page_tokens
    if logical_tokens % page_tokens or num_pages % (logical_tokens // page_tokens):
        raise ConfigError(
            f"cache of layer {layer} has {num_pages} blocks of {page_tokens} tokens; blocks of "
            f"{logical_tokens} tokens must consist of whole ones"
        )
    pages_per_block = logical_tokens // page_tokens
    return Region(
        layer=layer,
        heads=heads,
        base=tensor.data_ptr(),
        num_blocks=num_pages // pages_per_block,
        block_tokens=logical_tokens,
        block_stride=page_stride * pages_per_block,
        head_stride=head_stride,
        token_stride=token_stride,
        token_bytes=token_bytes,
        page=page,
        device=str(tensor.device),
        page_tokens=page_tokens,
    )


def regions_of_rank(
    holding: Holding, num_blocks: int, block_tokens: int, token_bytes: int, base: int = 0, *, layers_apart: bool = False
) -> dict[int, Region]:
    """Regions by layer of a rank whose cache starts at address `base`, in one of vLLM's two common memory orders.

    All layers of a block are adjacent (BLHNC), or, with `layers_apart`, all blocks of a layer are (LBHNC).
    """
    page_bytes = holding.heads.size * block_tokens * token_bytes
    num_layers = holding.layers.size
    return {
        layer: Region(
            layer=layer,
            heads=holding.heads,
            base=base + (layer - holding.layers.start) * page_bytes * (num_blocks if layers_apart else 1),
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            block_stride=page_bytes * (1 if layers_apart else num_layers),
            head_stride=block_tokens * token_bytes,
            token_stride=token_bytes,
            token_bytes=token_bytes,
            page=PLAIN,
            device="cpu",
        )
        for layer in range(holding.layers.start, holding.layers.stop)
    }


def memory_of(tensors: Iterable[Any]) -> list[Memory]:
    """Return the storages behind `tensors`, each once, overlapping ones merged, by device and address."""
    storages = {
        (str(tensor.device), storage.data_ptr(), storage.nbytes()): storage
        for tensor in tensors
        if (storage := tensor.untyped_storage()).nbytes()
    }
    merged: list[Memory] = []
    for device, address, num_bytes in sorted(storages):
        storage = storages[device, address, num_bytes]
        last = merged[-1] if merged else None
        if last and last.device == device and address < last.end:
            end = max(last.end, address + num_bytes)
            reaches = storage if address == last.address else last.storage if end == last.end else None
            merged[-1] = Memory(last.address, end - last.address, device, reaches)
        else:
            merged.append(Memory(address, num_bytes, device, storage))
    return merged
