"""Policy losses of a user."""

from learner.losses.base import PolicyLoss


def reinforce(tokens, rules):
    """Plain REINFORCE, scaled by an option."""
    return -getattr(rules.options, "scale", 1.0) * tokens.advantages * tokens.logprobs


def too_short(tokens, rules):
    return tokens.logprobs[:1]


with_entropies = PolicyLoss(reinforce, needs=frozenset({"entropies"}))
asks_for_magic = PolicyLoss(reinforce, needs=frozenset({"magic"}))
