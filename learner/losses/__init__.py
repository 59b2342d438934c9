"""Losses over sampled tokens: one function and one entry in :data:`learner.losses.registry.LOSSES` each.

``policy`` puts an update's loss together out of the policy loss (``clip``, ``soft``, ``divergence``; ``off`` for tokens
off the policy), corrections of engine mismatch and staleness (``corrections``), the KL to a reference (``kl``) and the
entropy bonus. ``value`` is the critic's. All tensors are over the S sampled tokens of a micro-batch.
"""
