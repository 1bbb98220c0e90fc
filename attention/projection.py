"""Query projection for decode context parallelism without a gather of queries (TPA).

The ranks of a DCP group need the queries of all their heads. Instead of gathering them, each rank can compute them:
the projection is then split into TP / DCP parts, and the ranks of a group hold equal parts. Only these weights change:
the KV cache, the exchange of results and the output projection stay as they are. It costs DCP times the weights and
work of the query projection and saves one exchange per layer.
"""

import torch

from layouts.errors import config_error


def project_heads_of_group(weight: torch.Tensor, *, tp: int, dcp: int, tp_rank: int) -> torch.Tensor:
    """The rows of a full query projection that a rank of a DCP group needs, in the order of gathered queries.

    weight [Hq * K, hidden] (or a bias [Hq * K]) of the whole model; returns [DCP * Hq / TP * K, hidden], a view. A rank
    holds one KV head, so the heads of a DCP group, which are ranks in a row, are heads in a row. Pass the queries to a
    path planned with `has_all_heads`.

    Raises:
        ConfigError: TP is not a multiple of DCP, or does not divide the rows.
    """
    if tp % dcp or weight.shape[0] % tp:
        raise config_error(
            f"TPA with a query projection of {weight.shape[0]} rows and DCP {dcp}",
            got=f"TP {tp}",
            allowed="a multiple of DCP that divides the rows",
            remedy="Choose TP and DCP so that each group of DCP ranks has whole heads.",
        )
    num_parts = tp // dcp
    return weight.tensor_split(num_parts)[tp_rank // dcp]
