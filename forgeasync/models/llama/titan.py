"""Llama-architecture models as TorchTitan builds them, in the rotate-half layout of Hugging Face files."""

from torchtitan.models.common import CosSinRoPE, TransformerBlock
from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
from torchtitan.models.llama3 import Llama3Model, parallelize_llama
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

from forgeasync.config import Llama3Rope, ModelFacts
from forgeasync.models.titan_family import LINEAR_INIT, TitanFamily, norm_config
from forgeasync.models.workarounds.rope import Llama3CosSinRoPE


def _rope(facts: ModelFacts) -> CosSinRoPE.Config:
    scaling = facts.rope_scaling
    if scaling is None:
        return CosSinRoPE.Config(
            dim=facts.head_dim, max_seq_len=facts.max_position_embeddings, theta=facts.rope_theta
        )
    assert isinstance(scaling, Llama3Rope)
    return Llama3CosSinRoPE.Config(
        dim=facts.head_dim,
        max_seq_len=facts.max_position_embeddings,
        theta=facts.rope_theta,
        scaling="llama",
        scaling_factor=scaling.factor,
        low_freq_factor=scaling.low_freq_factor,
        high_freq_factor=scaling.high_freq_factor,
        original_max_position_embeddings=scaling.original_max_position_embeddings,
    )


def _layers(facts: ModelFacts, attention_backend: str) -> list[TransformerBlock.Config]:
    # TorchTitan's own builder has no parameter head_dim, which some of these models set.
    return [
        Llama3TransformerBlock.Config(
            attention_norm=norm_config(facts.hidden_size, facts),
            ffn_norm=norm_config(facts.hidden_size, facts),
            attention=make_gqa_config(
                dim=facts.hidden_size,
                n_heads=facts.num_heads,
                n_kv_heads=facts.num_kv_heads,
                head_dim=facts.head_dim,
                wqkv_param_init=LINEAR_INIT,
                wo_param_init=LINEAR_INIT,
                inner_attention=get_attention_config(attention_backend),
                fuse_qkv=False,
                rope=_rope(facts),
            ),
            feed_forward=make_ffn_config(
                dim=facts.hidden_size,
                hidden_dim=facts.dense_hidden_size,
                w1_param_init=LINEAR_INIT,
                w2w3_param_init=LINEAR_INIT,
            ),
        )
        for _ in range(facts.num_layers)
    ]


LLAMA = TitanFamily(
    model=Llama3Model, layers=_layers, parallelize=parallelize_llama, adapter=Llama3StateDictAdapter
)
