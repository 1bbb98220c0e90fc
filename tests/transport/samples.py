"""One valid message of every type."""

from __future__ import annotations

from transport.control import messages as m

CACHE = m.CacheFormat("tiny", "float32", "auto", 2, 4, 64, False, "plain")
PLACEMENT = m.PlacementInfo(2, 1, 16, 4, 2, [m.HoldingInfo(0, 0, 4, 0, 2), m.HoldingInfo(1, 0, 4, 0, 2)])
REGION = m.RegionInfo(1, 0, 4, 4096, 8, 16, 16, 4096, 1024, 64, 64, "plain", "cpu")
MANIFEST = m.Manifest("inc", CACHE, PLACEMENT, [m.RankInfo(0, b"endpoint", [REGION])])
MESSAGES: list[m.Message] = [
    m.Open("cap", "load", CACHE, PLACEMENT, 37, b"digest", "inc", ["cma", "nixl"]),
    m.Renew("cap", "load"),
    m.Done("cap", "load", 1, 2),
    m.Release("cap", "load"),
    m.Opened("inc", 37, [[3, 2, 1]], 30.0, MANIFEST),
    m.Ok(12.5),
    m.Refused("incompatible", "dtype", "float32", "bfloat16"),
    m.Describe(),
    m.Description("0.1.0", "inc", ["cma", "nixl"], CACHE, PLACEMENT, 3),
    m.Gather("key", "reader", bytes(8), bytes(8), [1]),
    m.Gathered(2, 4096, 64),
    m.GiveBack("key", "reader", [2]),
]
