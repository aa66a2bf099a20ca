"""Names of a GPT's parameters at Hugging Face (hugging_face.py) and in GGUF files (gguf.py). Tables only."""

from __future__ import annotations

from smolcluster.models.architecture import Architecture, Family, GGUFLayout
from smolcluster.models.gpt_config import GPTConfig

GPT2_NAMES: dict[str, tuple[str, ...]] = {
    "token_embedding": ("transformer.wte",),
    "position_embedding": ("transformer.wpe",),
    "blocks.N.attention_norm": ("transformer.h.N.ln_1",),
    "blocks.N.attention.qkv": ("transformer.h.N.attn.c_attn",),
    "blocks.N.attention.out": ("transformer.h.N.attn.c_proj",),
    "blocks.N.mlp_norm": ("transformer.h.N.ln_2",),
    "blocks.N.mlp.up": ("transformer.h.N.mlp.c_fc",),
    "blocks.N.mlp.down": ("transformer.h.N.mlp.c_proj",),
    "norm": ("transformer.ln_f",),
    "lm_head": ("lm_head",),
}
LLAMA_NAMES: dict[str, tuple[str, ...]] = {
    "token_embedding": ("model.embed_tokens",),
    "blocks.N.attention_norm": ("model.layers.N.input_layernorm",),
    "blocks.N.attention.qkv": tuple(f"model.layers.N.self_attn.{part}_proj" for part in "qkv"),
    "blocks.N.attention.out": ("model.layers.N.self_attn.o_proj",),
    "blocks.N.mlp_norm": ("model.layers.N.post_attention_layernorm",),
    "blocks.N.mlp.up": ("model.layers.N.mlp.gate_proj", "model.layers.N.mlp.up_proj"),
    "blocks.N.mlp.down": ("model.layers.N.mlp.down_proj",),
    "norm": ("model.norm",),
    "lm_head": ("lm_head",),
}

LLAMA_PARTS = {"position": "rotary", "norm": "rmsnorm", "activation": "swiglu"}
LLAMA_KEYS = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_seq_len",
    "hidden_size": "model_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "intermediate_size": "ff_dim",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_theta",
    "tie_word_embeddings": "tie_head",
    "attention_dropout": "dropout",
}
LLAMA_DEFAULTS = {
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
}


LLAMA_NO_WEIGHTS = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"

# In GGUF files

_GGUF = {
    "token_embedding": ("token_embd",),
    "position_embedding": ("position_embd",),
    "blocks.N.attention_norm": ("blk.N.attn_norm",),
    "blocks.N.attention.out": ("blk.N.attn_output",),
    "blocks.N.mlp_norm": ("blk.N.ffn_norm",),
    "blocks.N.mlp.down": ("blk.N.ffn_down",),
    "norm": ("output_norm",),
    "lm_head": ("output",),
}
LLAMA_GGUF: dict[str, tuple[str, ...]] = {
    **_GGUF,
    "blocks.N.attention.qkv": ("blk.N.attn_q", "blk.N.attn_k", "blk.N.attn_v"),
    "blocks.N.mlp.up": ("blk.N.ffn_gate", "blk.N.ffn_up"),
}
GPT2_GGUF = {**_GGUF, "blocks.N.attention.qkv": ("blk.N.attn_qkv",), "blocks.N.mlp.up": ("blk.N.ffn_up",)}


GPT = Architecture(
    name="gpt",
    config=GPTConfig,
    model="smolcluster.models.gpt:GPT",
    families=(
        Family(
            architecture="GPT2LMHeadModel",
            model_type="gpt2",
            parts={"position": "learned", "norm": "layernorm", "activation": "gelu"},
            biases=("everywhere",),
            grouped_heads=False,
            names=GPT2_NAMES,
            transposed=("attention.qkv", "attention.out", "mlp.up", "mlp.down"),
            keys={
                "vocab_size": "vocab_size",
                "n_positions": "max_seq_len",
                "n_embd": "model_dim",
                "n_layer": "num_layers",
                "n_head": "num_heads",
                "n_inner": "ff_dim",
                "layer_norm_epsilon": "norm_eps",
                "tie_word_embeddings": "tie_head",
                "embd_pdrop": "dropout",
                "attn_pdrop": "dropout",
                "resid_pdrop": "dropout",
            },
            defaults={
                "n_inner": None,
                "layer_norm_epsilon": 1e-5,
                "tie_word_embeddings": True,
                "embd_pdrop": 0.1,
                "attn_pdrop": 0.1,
                "resid_pdrop": 0.1,
            },
            fields={"bias": True, "qkv_bias": True},
            choices={
                "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
                "scale_attn_weights": (True,),
                "scale_attn_by_inverse_layer_idx": (False,),
                "add_cross_attention": (False,),
            },
            no_weights=r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",
        ),
        Family(
            architecture="LlamaForCausalLM",
            model_type="llama",
            parts=LLAMA_PARTS,
            biases=("none", "everywhere"),
            names=LLAMA_NAMES,
            keys=LLAMA_KEYS | {"attention_bias": "qkv_bias", "mlp_bias": "bias"},
            defaults=LLAMA_DEFAULTS | {"attention_bias": False, "mlp_bias": False},
            choices={"hidden_act": ("silu", "swish")},
            no_weights=LLAMA_NO_WEIGHTS,
        ),
        Family(
            architecture="Qwen2ForCausalLM",
            model_type="qwen2",
            parts=LLAMA_PARTS,
            biases=("on q, k, v",),
            names=LLAMA_NAMES,
            keys=LLAMA_KEYS,
            defaults=LLAMA_DEFAULTS,
            fields={"bias": False, "qkv_bias": True},
            choices={"hidden_act": ("silu", "swish"), "use_sliding_window": (False,)},
            no_weights=LLAMA_NO_WEIGHTS,
        ),
    ),
    layouts=(
        GGUFLayout(architecture="llama", names=LLAMA_GGUF, parts=LLAMA_PARTS, adjacent_pairs=True),
        GGUFLayout(architecture="qwen2", names=LLAMA_GGUF, parts=LLAMA_PARTS | {"qkv_bias": True}),
        GGUFLayout(architecture="gpt2", names=GPT2_GGUF, rotary=False),
    ),
)
