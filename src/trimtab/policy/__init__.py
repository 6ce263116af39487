"""The model: loading, scoring tokens, the optimizer step."""

from trimtab.policy.demo_model import demo_model
from trimtab.policy.layers import Kernels, fuse_layers, unfuse_layers
from trimtab.policy.models import Policy, Precision, load_policy, pick_device
from trimtab.policy.score import Transcript, cut, log_probs, score, to_device
from trimtab.policy.update import UpdateOptions, UpdateResult, make_optimizer, update

__all__ = [
    "Kernels",
    "Policy",
    "Precision",
    "Transcript",
    "UpdateOptions",
    "UpdateResult",
    "cut",
    "demo_model",
    "fuse_layers",
    "load_policy",
    "log_probs",
    "make_optimizer",
    "pick_device",
    "score",
    "to_device",
    "unfuse_layers",
    "update",
]
