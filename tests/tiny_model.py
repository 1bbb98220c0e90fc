"""Writes a tiny random Llama checkpoint that vLLM serves: for tests that compare tokens, which need no tokenizer."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def write_tiny_llama(
    path: Path | str,
    *,
    num_kv_heads: int = 1,
    num_heads: int = 8,
    head_size: int = 32,
    num_layers: int = 2,
    hidden_size: int = 64,
    vocab_size: int = 512,
    max_positions: int = 4096,
    seed: int = 0,
) -> Path:
    """Writes config.json and model.safetensors (float32) into the directory `path` and returns it.

    Weights are normal with standard deviation 1.5 / sqrt(fan in), embeddings with 1: enough for greedy tokens that
    depend on the whole context. Start vLLM with `skip_tokenizer_init` and give prompts as token ids.
    """
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    inner_size = 2 * hidden_size

    def linear(num_out: int, num_in: int) -> torch.Tensor:
        return torch.randn(num_out, num_in, generator=generator) * (1.5 / num_in**0.5)

    tensors = {
        "model.embed_tokens.weight": torch.randn(vocab_size, hidden_size, generator=generator),
        "model.norm.weight": torch.ones(hidden_size),
        "lm_head.weight": linear(vocab_size, hidden_size),
    }
    for layer in range(num_layers):
        name = f"model.layers.{layer}."
        tensors |= {
            name + "input_layernorm.weight": torch.ones(hidden_size),
            name + "post_attention_layernorm.weight": torch.ones(hidden_size),
            name + "self_attn.q_proj.weight": linear(num_heads * head_size, hidden_size),
            name + "self_attn.k_proj.weight": linear(num_kv_heads * head_size, hidden_size),
            name + "self_attn.v_proj.weight": linear(num_kv_heads * head_size, hidden_size),
            name + "self_attn.o_proj.weight": linear(hidden_size, num_heads * head_size),
            name + "mlp.gate_proj.weight": linear(inner_size, hidden_size),
            name + "mlp.up_proj.weight": linear(inner_size, hidden_size),
            name + "mlp.down_proj.weight": linear(hidden_size, inner_size),
        }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": inner_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_size,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    return directory
