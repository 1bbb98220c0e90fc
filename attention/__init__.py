"""Context-parallel attention in plain torch, on any process group. Must not import vllm outside attention/vllm."""
