"""Plans by module type, for models that bring none: child path -> style, relative to a module of that class.

Types are known by class name, so that no model library is imported to look. What is not listed here is not cut unless
the user or the model itself says how.
"""

Plan = dict[str, str]


def _all(style: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), style)


def _attention(inputs: str, output: str) -> Plan:
    return _all("colwise", inputs) | _all("rowwise", output)


_QKVO = _attention("q_proj k_proj v_proj", "o_proj")
_QKV_OUT = _attention("q_proj k_proj v_proj", "out_proj")
_FC = _attention("fc1", "fc2")

FAMILIES: dict[str, Plan] = {
    # torch.nn
    "MultiheadAttention": {"in_proj_weight": "qkv_colwise", "in_proj_bias": "qkv_colwise", "out_proj": "rowwise"}
    | _all("colwise", "q_proj_weight k_proj_weight v_proj_weight"),
    "TransformerEncoderLayer": _attention("linear1", "linear2"),
    "TransformerDecoderLayer": _attention("linear1", "linear2"),
    # GPT-2
    "GPT2Attention": {"c_attn": "qkv_colwise", "q_attn": "colwise", "c_proj": "rowwise"},
    "GPT2MLP": _attention("c_fc", "c_proj"),
    # ViT and its relatives
    "ViTAttention": _QKVO,
    "ViTMLP": _FC,
    "ViTSelfAttention": _attention("query key value", ""),
    "ViTSelfOutput": _all("rowwise", "dense"),
    "ViTIntermediate": _all("colwise", "dense"),
    "ViTOutput": _all("rowwise", "dense"),
    # ALBERT, DistilBERT
    "AlbertAttention": _attention("query key value", "dense"),
    "AlbertLayer": _attention("ffn", "ffn_output"),
    "MultiHeadSelfAttention": _attention("q_lin k_lin v_lin", "out_lin"),
    "DistilBertSelfAttention": _attention("q_lin k_lin v_lin", "out_lin"),
    "FFN": _attention("lin1", "lin2"),
    # encoder-decoders and OPT
    "OPTAttention": _QKV_OUT,
    "OPTDecoderLayer": _FC,
    "T5Attention": _attention("q k v", "o"),
    "T5DenseActDense": _attention("wi", "wo"),
    "T5DenseGatedActDense": _attention("wi_0 wi_1", "wo"),
    # fused projections, which the models' own plans gather
    "Phi3Attention": {"qkv_proj": "qkv_colwise", "o_proj": "rowwise"},
    "Phi3MLP": {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"},
    "GlmMLP": {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"},
    "Glm4MLP": {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"},
}

for _name in ("Bert", "Roberta", "XLMRoberta", "Camembert", "Electra", "Data2VecText", "Ernie"):
    FAMILIES[f"{_name}SelfAttention"] = _attention("query key value", "")
    FAMILIES[f"{_name}CrossAttention"] = _attention("query key value", "")
    FAMILIES[f"{_name}SelfOutput"] = _all("rowwise", "dense")
    FAMILIES[f"{_name}Intermediate"] = _all("colwise", "dense")
    FAMILIES[f"{_name}Output"] = _all("rowwise", "dense")
for _name in ("Bart", "MBart", "Whisper", "Marian", "Pegasus", "Blenderbot"):
    FAMILIES[f"{_name}Attention"] = _QKV_OUT
    FAMILIES[f"{_name}EncoderLayer"] = FAMILIES[f"{_name}DecoderLayer"] = _FC
for _name in ("DeiT", "Dinov2", "Siglip", "CLIP"):
    FAMILIES[f"{_name}Attention"] = _QKVO | _QKV_OUT
    FAMILIES[f"{_name}MLP"] = _FC
