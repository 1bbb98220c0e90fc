"""Multi-head latent attention by absorption: queries meet the latent cache itself (DeepSeek-V2, arXiv 2405.04434).

Keys are up_key times the latent, so a query may be multiplied by up_key instead; values likewise after attention. Then
all query heads share one KV head, the latent, and every path of grouped-query attention applies. Where keys and values
are formed instead, as prefill does, the format `entries.ExpandedLatent` says how.
"""

import torch

from attention.merge import Partial


def absorb(query: torch.Tensor, up_key: torch.Tensor) -> torch.Tensor:
    """query [T, H, N + rotary], up_key [H, N, R] -> queries over latent entries [T, H, R + rotary]."""
    without_position, rotary = query.tensor_split([up_key.shape[1]], dim=-1)
    return torch.cat([torch.einsum("thn,hnr->thr", without_position, up_key), rotary], dim=-1)


def project_values(part: Partial, up_value: torch.Tensor) -> Partial:
    """Results over latents, out [T, H, R], with up_value [H, R, V] -> out [T, H, V] float32."""
    return Partial(torch.einsum("thr,hrv->thv", part.out, up_value.float()), part.lse)
