"""What a prompt is, as far as its KV cache is concerned: its tokens and whatever else changes the KV at a position.

Both nodes digest the prompt they hold. A decode node may read KV only for a prompt it proves to have, so a
capability handed to it with another prompt can neither answer from, nor fill its prefix cache with, foreign KV.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vllm.v1.request import Request

DIGEST_BYTES = 16


def digest(token_ids: Sequence[int], num_tokens: int, extra: str = "") -> bytes:
    """Digest of the first `num_tokens` token ids and of `extra` (LoRA, cache salt, multimodal hashes)."""
    tokens = np.asarray(token_ids[:num_tokens], dtype="<i8")
    return hashlib.blake2b(tokens.tobytes() + extra.encode(), digest_size=DIGEST_BYTES).digest()


def consists_of_tokens(request: Request) -> bool:
    """Whether token ids say all about the prompt. Embeddings given as a prompt do not move between nodes."""
    return request.prompt_token_ids is not None and request.prompt_embeds is None


def digest_of(request: Request) -> Callable[[int], bytes]:
    """A function of n: digest of the first n tokens of a vLLM request."""
    token_ids, salt = request.all_token_ids, request.cache_salt
    lora = request.lora_request.lora_name if request.lora_request else ""
    media = [(feature.identifier, feature.mm_position.offset) for feature in request.mm_features or ()]

    def of_first(num_tokens: int) -> bytes:
        within = [identifier for identifier, offset in media if offset < num_tokens]
        return digest(token_ids, num_tokens, repr((lora, salt, within)))

    return of_first
