"""What is refused before an engine starts, and how vLLM's functions are wrapped. Needs no running vLLM."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from attention.vllm import seams, settings
from layouts import ConfigError


def config(
    *,
    tp: int = 1,
    pcp: int = 1,
    dcp: int = 1,
    pp: int = 1,
    heads: int = 1,
    interleave: int = 1,
    block: int = 16,
    connectors: tuple[str, ...] | None = None,
    **other: Any,
) -> Any:
    """The part of a VllmConfig that is read."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp,
            prefill_context_parallel_size=pcp,
            decode_context_parallel_size=dcp,
            pipeline_parallel_size=pp,
            cp_kv_cache_interleave_size=interleave,
            worker_cls=other.get("worker_cls", seams.STOCK_WORKER),
        ),
        model_config=SimpleNamespace(
            use_mla=other.get("mla", False),
            is_hybrid=False,
            is_encoder_decoder=False,
            is_moe=other.get("moe", False),
            is_multimodal_model=False,
            uses_mrope=False,
            architecture="TestModel",
            get_total_num_kv_heads=lambda: heads,
        ),
        cache_config=SimpleNamespace(block_size=block, cache_dtype=other.get("cache_dtype", "auto")),
        lora_config=other.get("lora_config"),
        speculative_config=other.get("speculative_config"),
        kv_transfer_config=connectors
        and SimpleNamespace(
            has_connector=connectors.__contains__,
            kv_connector=connectors[0] if len(connectors) == 1 else "MultiConnector",
            kv_connector_extra_config=extra_config(connectors, other.get("extra", {})),
        ),
    )


def extra_config(connectors: tuple[str, ...], extra: dict[str, Any]) -> dict[str, Any]:
    """What vLLM keeps for one connector, or for several inside a MultiConnector."""
    if len(connectors) == 1:
        return extra
    return {"connectors": [{"kv_connector": name, "kv_connector_extra_config": extra} for name in connectors]}


ACCEPTED = [
    config(tp=2, dcp=2),
    config(tp=4, dcp=2, interleave=16),
    config(tp=4, dcp=2, heads=2),
    config(pcp=2, heads=3),
    config(pcp=2, dcp=2, heads=3, interleave=8),
    config(tp=2, pcp=2, dcp=2, heads=2),
]

REFUSED = [
    (config(tp=2, dcp=2, interleave=3), ["3", "16", "1, 2, 4, 8, 16"]),
    (config(tp=2, dcp=2, interleave=32), ["32", "16"]),
    (config(tp=2, dcp=2, heads=2), ["DCP x KV heads <= TP", "2 x 2 > 2"]),
    (config(tp=12, dcp=2, heads=4), ["TP / KV heads = 12 / 4 = 3"]),
    (config(tp=2, pcp=2, dcp=4), ["--decode-context-parallel-size 2"]),
    (config(tp=2, dcp=2, mla=True), ["TestModel", "grouped-query"]),
    (config(pcp=2, pp=2), ["--pipeline-parallel-size 2"]),
    (config(pcp=2, speculative_config="ngram"), ["speculative"]),
    (config(pcp=2, lora_config="any"), ["LoRA"]),
    (config(pcp=2, moe=True), ["TestModel", "dense"]),
    (config(tp=2, dcp=2, cache_dtype="fp8"), ["fp8", "auto"]),
    (config(tp=2, dcp=2, connectors=("WeaveConnector",), extra={"pages": "native"}), ['"pages": "native"', '"plain"']),
    (config(tp=2, dcp=2, worker_cls="my.Worker"), ["my.Worker", seams.STOCK_WORKER]),
]


def update(vllm_config: Any) -> None:
    seams._update_config(lambda platform, of: None, None, vllm_config)


@pytest.mark.parametrize("vllm_config", ACCEPTED)
def test_accepted_layouts_get_the_worker(vllm_config: Any) -> None:
    update(vllm_config)
    update(vllm_config)  # vLLM may check a configuration twice
    assert vllm_config.parallel_config.worker_cls == seams.WORKER


@pytest.mark.parametrize(("vllm_config", "words"), REFUSED)
def test_refused_layouts_say_numbers_and_remedy(vllm_config: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        update(vllm_config)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


@pytest.mark.parametrize("connectors", [None, ("OtherConnector",), ("WeaveConnector",)])
def test_without_context_parallelism_the_worker_stays(connectors: tuple[str, ...] | None) -> None:
    vllm_config = config(heads=4, connectors=connectors)
    update(vllm_config)
    assert vllm_config.parallel_config.worker_cls == seams.STOCK_WORKER
    assert settings.uses_plain_pages(vllm_config) == (connectors == ("WeaveConnector",))


@pytest.mark.parametrize("connectors", [("WeaveConnector",), ("OtherConnector", "WeaveConnector")])
@pytest.mark.parametrize(("extra", "plain"), [({}, True), ({"pages": "plain"}, True), ({"pages": "native"}, False)])
def test_connector_chooses_its_pages(connectors: tuple[str, ...], extra: dict[str, str], plain: bool) -> None:
    assert settings.uses_plain_pages(config(heads=4, connectors=connectors, extra=extra)) == plain


def test_head_check_of_vllm_is_relaxed_only_for_shards_over_pcp() -> None:
    seen = []

    def stock(model_config: Any, parallel_config: Any) -> None:
        seen.append(parallel_config.decode_context_parallel_size)

    for vllm_config in (config(pcp=2, dcp=2), config(tp=2, dcp=2), config(tp=2, pcp=2, dcp=4)):
        before = vllm_config.parallel_config.decode_context_parallel_size
        seams._verify_heads(stock, None, vllm_config.parallel_config)
        assert vllm_config.parallel_config.decode_context_parallel_size == before
    assert seen == [1, 2, 4]


class Stock:
    def size(self, factor: int) -> int:
        return 2 * factor

    def width(self, factor: int) -> int:
        return factor

    def height(self) -> int:
        return 1

    @classmethod
    def name(cls, prefix: str) -> str:
        return prefix + cls.__name__


def test_wrapping_keeps_the_kind_of_method_and_happens_once() -> None:
    def larger(stock: seams.Function, *arguments: Any) -> Any:
        return stock(*arguments) * 10

    for _ in range(2):
        seams.install_all(
            seams.Seam(Stock, "size", ("self", "factor"), larger), seams.Seam(Stock, "name", ("cls", "prefix"), larger)
        )
    assert Stock().size(1) == 20
    assert Stock.name("a ") == "a Stock" * 10


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("kind", r"Stock of vLLM 0.99.1: got no method kind"),
        ("width", r"width of vLLM 0.99.1.*self, factor.*self, size"),
    ],
)
def test_changed_vllm_is_named_and_nothing_is_wrapped(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.version", SimpleNamespace(__version__="0.99.1"))
    height = Stock.height
    with pytest.raises(seams.SeamError, match=words):
        seams.install_all(
            seams.Seam(Stock, "height", ("self",), lambda stock, of: 0),
            seams.Seam(Stock, name, ("self", "size"), lambda stock, of, size: 0),
        )
    assert Stock.height is height
