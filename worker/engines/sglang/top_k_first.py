"""Gives `top_k` and `top_p` together the meaning that they have in the other engines: `top_p` is a share of what
`top_k` leaves. In SGLang it is a share of all tokens."""

from __future__ import annotations

from typing import Any


def sample_top_k_first(
    original: Any, probs: Any, top_ks: Any, top_ps: Any, min_ps: Any, has_min_p: bool, seed: Any, at: Any, **_: Any
) -> Any:
    """Replaces SGLang's sampler in torch. `probs`: [rows, vocabulary]; `at`: the position of each row's
    token. The adapter refuses `min_p`.

    SGLang draws by the places of the sorted tokens here, and by the tokens if no row has `top_k` or `top_p`. This draws
    by the tokens, so a row with a seed gets the same token whatever the other rows ask for."""
    import torch
    from sglang.srt.layers.sampler import sampling_from_probs_torch

    ranked, tokens = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ranked.shape[-1], device=ranked.device)
    ranked = ranked.masked_fill(rank >= top_ks.view(-1, 1), 0.0)
    mass = ranked.cumsum(dim=-1)
    share = top_ps.view(-1, 1)
    # Without top_p, rounding must bar no token.
    ranked = ranked.masked_fill((mass - ranked > share * mass[:, -1:]) & (share < 1.0), 0.0)
    return sampling_from_probs_torch(torch.zeros_like(probs).scatter(1, tokens, ranked), seed, at)


def filter_top_k_first(original: Any, probs: Any, top_ks: Any, top_ps: Any, **_: Any) -> Any:
    """Wraps FlashInfer's sampler, which knows both meanings."""
    return original(probs, top_ks, top_ps, filter_apply_order="top_k_first")
