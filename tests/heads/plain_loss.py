"""Cross entropy by its definition, with gradients by autograd, to compare the chunked loss with.

Letters: N rows (positions), D hidden size, V vocabulary, K heads, M states of the teacher.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cross_entropy

from pipeline.conversations.spans import IGNORED
from pipeline.heads.losses import Teacher


def plain_summed_cross_entropy(
    hidden_KND: Tensor, lm_head: Tensor, labels_KN: Tensor, teacher: Teacher | None = None
) -> Tensor:
    """Sum each head's cross entropy over its labels: [K]."""
    logits_KNV = hidden_KND @ lm_head.mT
    losses_KN = cross_entropy(
        logits_KNV.flatten(0, 1), labels_KN.flatten(), ignore_index=IGNORED, reduction="none"
    )
    losses_KN = losses_KN.view_as(labels_KN)
    if teacher is not None:
        p_MV = teacher.head.logits(teacher.states_MD.to(hidden_KND.dtype)).softmax(1)
        soft_KN = -(p_MV[teacher.rows_KN.clamp(min=0)] * logits_KNV.log_softmax(2)).sum(2)
        share_KN = teacher.share * ((labels_KN != IGNORED) & (teacher.rows_KN >= 0))
        losses_KN = (1 - share_KN) * losses_KN + share_KN * soft_KN
    return losses_KN.sum(1)
