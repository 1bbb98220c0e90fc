"""Options that the commands share: layouts written as `tp=8,dcp=2,block=32`, and the sizes of a model's KV cache."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace

from layouts.errors import ConfigError, config_error, listed
from layouts.parallel import ParallelLayout

MAX_TOKENS = 1 << 24
MAX_SIZE = 1 << 16
MAX_RANKS = 4096
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
LAYOUT_HELP = (
    "sizes as in tp=8,pcp=2,dcp=2,pp=1,block=16,interleave=16; what is left out is as in vLLM (block 16, rest 1); "
    "layouts that vLLM itself does not start are accepted too"
)

_FIELDS = {
    "tp": "tp",
    "pcp": "pcp",
    "dcp": "dcp",
    "pp": "pp",
    "block": "block_tokens",
    "interleave": "interleave_tokens",
}
_SHARDS_KV = "pcp_shards_kv"
_KEYS = (*_FIELDS, _SHARDS_KV)


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """What a model stores per token: in each layer `num_kv_heads` entries of `entry_bytes`, key and value together."""

    num_kv_heads: int
    num_layers: int
    entry_bytes: int
    mla: bool

    @property
    def name(self) -> str:
        """In words."""
        kind = "MLA latent" if self.mla else f"{self.num_kv_heads} KV head{'s' if self.num_kv_heads > 1 else ''}"
        layers = f"{self.num_layers} layer{'s' if self.num_layers > 1 else ''}"
        return f"{kind}, {layers}, {self.entry_bytes:,} bytes per token, head and layer"


def add_cache_options(parser: argparse.ArgumentParser, *, instead_of: str = "") -> None:
    """Adds the options that `cache_sizes` reads; `instead_of` another option they have no default and are required."""
    heads, layers = "default 8", "default 1"
    if instead_of:
        heads, layers = f"this or --mla is needed without {instead_of}", f"needed without {instead_of}"
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--kv-heads", type=integer(1, MAX_SIZE), metavar="H", help=f"KV heads of the model ({heads})")
    kind.add_argument("--mla", action="store_true", help="multi-head latent attention: one latent instead of KV heads")
    parser.add_argument("--layers", type=integer(1, MAX_SIZE), metavar="L", help=f"layers with a KV cache ({layers})")
    parser.add_argument("--head-dim", type=integer(1, MAX_SIZE), metavar="D", help="head size (128; MLA latent 576)")
    parser.add_argument("--dtype", choices=sorted(DTYPE_BYTES), default="bfloat16", help="of the KV cache (bfloat16)")


def add_replicas_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option that `Replicas` is made from."""
    parser.add_argument(
        "--replicas",
        choices=("auto", "fetch", "share"),
        default="auto",
        help="how decode ranks with equal content get it: each one fetches its own copy (what the connector does), "
        "or they share one copy and exchange its parts; auto takes what moves fewer bytes between the nodes (auto)",
    )


@dataclass(frozen=True, slots=True)
class Replicas:
    """How replicas at the target are filled: what was asked for, and the bytes between the nodes of both ways."""

    asked: str
    fetched_bytes: int
    shared_bytes: int

    @property
    def shared(self) -> bool:
        """Whether they share one copy."""
        return self.asked == "share" or (self.asked == "auto" and self.shared_bytes < self.fetched_bytes)

    @property
    def explanation(self) -> str:
        """What was chosen, why, and both numbers."""
        fetched, shared = f"{self.fetched_bytes:,}", f"{self.shared_bytes:,}"
        if fetched == shared:
            return f"Replicas: nothing to share at the target; {fetched} bytes between the nodes."
        chosen = ("share" if self.shared else "fetch") + (" (auto)" if self.asked == "auto" else "")
        return (
            f"Replicas: {chosen}. Between the nodes fetch moves {fetched} bytes; share moves {shared}, and "
            f"{self.fetched_bytes - self.shared_bytes:,} inside the target node. The connector fetches today."
        )


def cache_sizes(options: argparse.Namespace) -> CacheSizes:
    """The model's sizes from the options, with their defaults."""
    element_bytes = DTYPE_BYTES[options.dtype]
    layers = options.layers or 1
    if options.mla:
        return CacheSizes(1, layers, (options.head_dim or 576) * element_bytes, True)
    return CacheSizes(options.kv_heads or 8, layers, 2 * (options.head_dim or 128) * element_bytes, False)


def parse_layout(option: str, text: str, cache: CacheSizes) -> ParallelLayout:
    """The layout that an option describes.

    Raises:
        ConfigError: an unknown or repeated key, a value that is no positive number, sizes that cannot work together.
    """
    sizes = _parse_sizes(option, text)
    try:
        return _layout(sizes, cache)
    except ConfigError as error:
        remedy = ""
        if not cache.mla and _works(sizes, replace(cache, num_kv_heads=1, mla=True)):
            remedy = f" This is for {cache.num_kv_heads} KV heads; with --mla the layout works."
        raise ConfigError(f"{option} {text}: {error}{remedy}") from None


def vllm_notes(**layouts: ParallelLayout) -> list[str]:
    """One line for each layout that can be planned, but that vLLM does not start."""
    return [
        f"Note: vLLM 0.32 does not start the {end}: with pcp={layout.pcp} it starts dcp "
        f"{listed(sorted({1, layout.pcp, layout.tp * layout.pcp}))}, and never pcp_shards_kv."
        for end, layout in layouts.items()
        if not layout.is_started_by_vllm
    ]


def integer(minimum: int, maximum: int) -> Callable[[str], int]:
    """A type of argparse options: an integer from `minimum` to `maximum`."""

    def parse(text: str) -> int:
        number = int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else -1
        if not minimum <= number <= maximum:
            raise argparse.ArgumentTypeError(f"got {text!r}; allowed: an integer from {minimum} to {maximum}")
        return number

    return parse


def positive(text: str) -> float:
    """A type of argparse options: a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: a number above 0")
    return number


def _parse_sizes(option: str, text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        if key not in _KEYS:
            raise config_error(
                f"{option} key", got=repr(key), allowed=listed(_KEYS), remedy="Write sizes as tp=8,dcp=2,block=16."
            )
        if key in sizes:
            raise config_error(f"{option} key", got=f"{key} twice", allowed="each key once", remedy="Leave one out.")
        limits = (0, 1) if key == _SHARDS_KV else (1, MAX_SIZE)
        try:
            sizes[key] = integer(*limits)(value)
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"{option} {key}: {error}") from None
    return sizes


def _layout(sizes: dict[str, int], cache: CacheSizes) -> ParallelLayout:
    arguments: dict[str, int] = {_FIELDS[key]: value for key, value in sizes.items() if key in _FIELDS}
    layout = ParallelLayout(
        num_kv_heads=cache.num_kv_heads,
        mla=cache.mla,
        num_layers=cache.num_layers,
        pcp_shards_kv=bool(sizes.get(_SHARDS_KV)),
        **arguments,  # type: ignore[arg-type]
    )
    if layout.num_ranks > MAX_RANKS:
        raise config_error("ranks", got=layout.num_ranks, allowed=f"up to {MAX_RANKS}", remedy="Lower tp, pcp or pp.")
    return layout


def _works(sizes: dict[str, int], cache: CacheSizes) -> bool:
    try:
        _layout(sizes, cache)
    except ConfigError:
        return False
    return True
