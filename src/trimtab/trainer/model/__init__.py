"""The model: loading it, scoring tokens, the optimizer step."""

from trimtab.trainer.config import DEMO_MODELS, is_hub_model
from trimtab.trainer.model.layers import Kernels, fuse_layers, unfuse_layers
from trimtab.trainer.model.loading import (
    add_lora,
    demo_model,
    demo_tokenizer,
    enable_gradient_checkpointing,
    freeze_in_bf16,
    load_policy,
    pick_device,
    tokenizer_at_hand,
)
from trimtab.trainer.model.loss_scale import LossScale
from trimtab.trainer.model.policy import DTYPES, Policy, Precision
from trimtab.trainer.model.pretrained import check_config, check_counts, read_config
from trimtab.trainer.model.prompts import LongPromptError
from trimtab.trainer.model.score import (
    Transcript,
    idle_pass,
    log_probs,
    score,
    split_by_token_budget,
    to_device,
    tool_tokens,
    with_shared_prompts,
)
from trimtab.trainer.model.update import (
    UpdateOptions,
    UpdateResult,
    clip_gradients,
    least_passes,
    make_optimizer,
    response_shares,
    share_sizes,
    start_gradients,
    update,
)

__all__ = [
    "DEMO_MODELS", "DTYPES", "Kernels", "LongPromptError", "LossScale", "Policy", "Precision", "Transcript",
    "UpdateOptions", "UpdateResult", "add_lora", "check_config", "check_counts", "clip_gradients", "demo_model",
    "demo_tokenizer", "enable_gradient_checkpointing", "freeze_in_bf16", "fuse_layers", "idle_pass", "is_hub_model",
    "least_passes", "load_policy", "log_probs", "make_optimizer", "pick_device", "read_config", "response_shares",
    "score", "share_sizes", "split_by_token_budget", "start_gradients", "to_device", "tokenizer_at_hand", "tool_tokens",
    "unfuse_layers", "update", "with_shared_prompts",
]  # fmt: skip
