#!/usr/bin/env python3
"""Write a tiny Llama with random weights of a fixed seed, so that vLLM runs without a model hub.

usage: tiny_model.py FOLDER

Two layers, two KV heads of 32, float32. Prompts are token ids 0..255; the tokenizer, which only the API server uses, calls
them t0..t255. With vLLM's CPU attention and 32 tokens per block, one block of one layer is 2 heads x 32 tokens x (32 + 32) x
4 bytes = 16384 bytes.
"""
import json
import pathlib
import sys

import tokenizers
import torch
from safetensors.torch import save_file

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 32
HIDDEN, INTERMEDIATE, VOCABULARY = 64, 128, 256

folder = pathlib.Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
(folder / "config.json").write_text(json.dumps({
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32",
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
    "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "vocab_size": VOCABULARY, "max_position_embeddings": 2048,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1,
}, indent=1) + "\n")

random = torch.Generator().manual_seed(1)


def matrix(rows, columns):
    # Wide enough that attention matters: a wrong KV block changes the greedy tokens.
    return torch.randn(rows, columns, generator=random) * (1.5 / columns**0.5)


weights = {
    "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=random),
    "lm_head.weight": matrix(VOCABULARY, HIDDEN),
    "model.norm.weight": torch.ones(HIDDEN),
}
for layer in range(LAYERS):
    for name, tensor in {
        "self_attn.q_proj": matrix(HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": matrix(HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": matrix(INTERMEDIATE, HIDDEN),
        "mlp.up_proj": matrix(INTERMEDIATE, HIDDEN),
        "mlp.down_proj": matrix(HIDDEN, INTERMEDIATE),
        "input_layernorm": torch.ones(HIDDEN),
        "post_attention_layernorm": torch.ones(HIDDEN),
    }.items():
        weights[f"model.layers.{layer}.{name}.weight"] = tensor
save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

words = tokenizers.models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0")
tokenizer = tokenizers.Tokenizer(words)
tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
tokenizer.save(str(folder / "tokenizer.json"))
(folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "t0", "eos_token": "t1"}) + "\n")
