"""Group Relative Policy Optimization: what is better than the other answers to the same prompt becomes likelier.

From "DeepSeekMath" (Shao et al., 2024): the mean reward of a group of answers to one prompt stands in for the value
model of PPO; the rest is PPO's clipped objective, with a penalty for leaving a reference policy.
"""

from __future__ import annotations

import torch
from torch import Tensor


def advantages(rewards: Tensor, group: int) -> Tensor:
    """Return by how much each answer is better than its group's mean, in standard deviations of the group.

    Args:
        rewards: ``(prompts * group,)``, the answers to one prompt side by side.
        group: answers to a prompt.
    """
    grouped = rewards.view(-1, group)
    centred = grouped - grouped.mean(dim=1, keepdim=True)
    return (centred / (grouped.std(dim=1, keepdim=True) + 1e-4)).flatten()


def loss(new: Tensor, old: Tensor, reference: Tensor, advantage: Tensor, *, clip: float, kl_weight: float) -> Tensor:
    """Return the loss to minimize.

    Args:
        new, old, reference: ``(batch, length)`` log-probabilities of the answers' digits: of the policy that is being
            trained, of the policy that wrote them, and of the reference.
        advantage: ``(batch,)``.
        clip: how far from 1 the ratio of new to old may move and still count.
        kl_weight: price of a nat of divergence from the reference, per digit.
    """
    ratio = (new - old).exp()
    gain = advantage[:, None]
    objective = torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain)
    behind = reference - new
    divergence = behind.exp() - behind - 1  # an estimate of KL(new ‖ reference) that is never negative
    return (kl_weight * divergence - objective).mean()
