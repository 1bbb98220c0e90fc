"""Layout arithmetic of sharded KV caches: who stores which token, and what moves between two such layouts.

Standard library and numpy only. Knows no torch, no vLLM, no memory address and no peer.
"""

from layouts.chunk_swap import ChunkSwap, chunk_swap
from layouts.errors import ConfigError, PlanError
from layouts.interleave import NOT_OWNED, Interleave
from layouts.parallel import Holding, ParallelLayout, Placement, Span, split_layers
from layouts.plan import TransferPlan, plan_transfer
from layouts.routes import Route
from layouts.runs import RUN_DTYPE
from layouts.sharing import SharedPlan, share_replicas
from layouts.volume import RankVolume, Volume, plan_volume, predict_shared_volume, predict_volume

__all__ = [
    "NOT_OWNED",
    "RUN_DTYPE",
    "ChunkSwap",
    "ConfigError",
    "Holding",
    "Interleave",
    "ParallelLayout",
    "Placement",
    "PlanError",
    "RankVolume",
    "Route",
    "SharedPlan",
    "Span",
    "TransferPlan",
    "Volume",
    "chunk_swap",
    "plan_transfer",
    "plan_volume",
    "predict_shared_volume",
    "predict_volume",
    "share_replicas",
    "split_layers",
]
