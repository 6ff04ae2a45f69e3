"""Direct preference optimisation, of which logits exist for a few tokens only.

After Rafailov et al., "Direct Preference Optimization" (2023). The loss needs four
numbers a pair: how likely policy and reference find the chosen answer and the rejected
one. Each is a sum over tokens, and it is the tokens that are chunked.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from chunkcheck import StrategyName, chunk_and_checkpoint

IGNORED = -100


class Model(NamedTuple):
    """What a language model has before its logits.

    Attributes:
        hidden: `(pairs, 2, sequence, width)`: the chosen answer, then the rejected one.
        weight: The head, `(classes, width)`.
        bias: `(classes,)`.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None


class Preference(NamedTuple):
    """What `dpo_loss` returns.

    Attributes:
        loss: The mean over the pairs.
        chosen: The rewards of the chosen answers, `(pairs,)`, without gradient.
        rejected: Those of the rejected ones.
    """

    loss: Tensor
    chosen: Tensor
    rejected: Tensor


def dpo_loss(
    policy: Model,
    reference: Model,
    target: Tensor,
    mask: Tensor,
    *,
    chunk_size: int | None,
    beta: float = 0.1,
    strategy: StrategyName = "auto",
) -> Preference:
    """Return the loss, and the rewards to watch.

    Args:
        policy: What is trained.
        reference: What it is compared with; its width may differ. It gets no gradient.
        target: `(pairs, 2, sequence)`: the token that each position is to predict.
        mask: The same shape, true where it counts: in the answer, not in the prompt.
        chunk_size: How many tokens have logits at a time.
        beta: How much a distance from the reference costs.
        strategy: As in `chunk_and_checkpoint`. "grad_in_forward" is for one number.
    """
    likely = sequence_log_probabilities(
        policy, target, mask, chunk_size=chunk_size, strategy=strategy
    )
    with torch.no_grad():
        before = sequence_log_probabilities(
            reference, target, mask, chunk_size=chunk_size
        )
    rewards = beta * (likely - before)
    chosen, rejected = rewards.unbind(1)
    loss = -F.logsigmoid(chosen - rejected).mean()
    return Preference(loss, chosen.detach(), rejected.detach())


def sequence_log_probabilities(
    model: Model,
    target: Tensor,
    mask: Tensor,
    *,
    chunk_size: int | None,
    strategy: StrategyName = "auto",
) -> Tensor:
    """Return the log-probability of each answer, `(pairs, 2)`; see `dpo_loss`."""
    tokens = chunk_and_checkpoint(
        log_probabilities,
        model.hidden.flatten(0, -2),
        target.masked_fill(~mask, IGNORED).flatten(),
        model.weight,
        model.bias,
        chunk_size=chunk_size,
        batch_dim=(0, 0, None, None),
        strategy=strategy,
    )
    return tokens.view_as(target).sum(-1)


def log_probabilities(
    hidden: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Return the log-probability of each target, `(tokens,)`; 0 where `IGNORED`."""
    logits = F.linear(hidden, weight, bias)
    return -F.cross_entropy(logits, target, ignore_index=IGNORED, reduction="none")
