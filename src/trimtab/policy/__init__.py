"""The model: loading, scoring tokens, the optimizer step."""

from trimtab.policy.models import Policy, load_policy
from trimtab.policy.score import Transcript, score
from trimtab.policy.update import UpdateOptions, make_optimizer, update

__all__ = ["Policy", "Transcript", "UpdateOptions", "load_policy", "make_optimizer", "score", "update"]
