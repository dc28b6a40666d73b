"""Delta-compressed refit: keep rollout engines bit-identical to a trainer by moving only the bits that changed."""
