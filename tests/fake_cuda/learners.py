"""Learners on a fake GPU, without files, and their batches."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from transformers import LlamaForCausalLM

from pipeline.conversations.spans import Span
from pipeline.heads.kinds import head_kind
from pipeline.heads.losses import TargetHead
from pipeline.targets.lora import add_lora
from pipeline.training.adapted_backbone import Backbone
from pipeline.training.feature_batches import Batch
from pipeline.training.heads_and_backbone import BackboneLearner, MicroBatch
from pipeline.training.heads_only import HeadsLearner
from pipeline.training.task import Workers
from pipeline.training.text_batches import Text, assemble_texts

CUDA = torch.device("cuda", 0)
BF16 = torch.bfloat16


def _learner(cls, settings, hidden_size, vocab_size, recipe):
    learner, kind = cls.__new__(cls), head_kind(settings.heads)
    learner.spec, learner.workers = SimpleNamespace(settings=settings), Workers()
    learner.device, learner.recipe = CUDA, recipe
    learner.heads = kind(kind.shape_of(settings, hidden_size, vocab_size), device=CUDA)
    learner.modules = {"heads": learner.heads}
    learner.peak_lrs = {"heads": 1e-3, "backbone": 1e-3}
    return learner


def heads_learner(settings, hidden_size, vocab_size, recipe):
    """A learner of heads alone, with soft labels."""
    learner = _learner(HeadsLearner, settings, hidden_size, vocab_size, recipe)
    weight_VD = torch.empty(vocab_size, hidden_size, dtype=BF16, device=CUDA)
    learner.target_head = TargetHead(weight_VD)
    return learner


def backbone_learner(settings, target, recipe):
    """A learner of heads and the backbone of a Llama configuration."""
    learner = _learner(BackboneLearner, settings, target.hidden_size, target.vocab_size, recipe)
    tuned = learner.settings = settings.backbone
    learner.dtype, learner.heads_weight = BF16, lambda step: 0.01
    learner.backbone = Backbone.__new__(Backbone)
    nn.Module.__init__(learner.backbone)
    with CUDA:
        model = LlamaForCausalLM(target).to(BF16)
        learner.backbone.tuned = add_lora(
            model, rank=tuned.lora_rank, alpha=tuned.lora_alpha, dropout=tuned.lora_dropout
        )
    learner.modules["backbone"] = learner.backbone
    return learner


def feature_batch(hidden_size, num_positions, num_heads):
    """Positions of one text that is cut off at its end."""
    hidden_ND = torch.empty(num_positions, hidden_size, dtype=BF16, device=CUDA)
    tokens_N = torch.arange(num_positions).remainder(1000)
    labels_KN = tokens_N.expand(num_heads, -1).contiguous()
    rows_KN = torch.arange(num_positions).expand(num_heads, -1).contiguous()
    rows_KN[:, -1] = -1
    next_N, labels_KN, rows_KN = (each.to(CUDA) for each in (tokens_N, labels_KN, rows_KN))
    return Batch(hidden_ND, next_N, labels_KN, torch.empty_like(hidden_ND), rows_KN)


def text_batch(length, num_heads, seed=0):
    """One text of a single answer."""
    tokens = np.arange(length + 1, dtype=np.int32)
    text = Text(tokens, (Span(1, length + 1, "assistant"),), length)
    return MicroBatch(assemble_texts([[text]], num_heads), seed)
