"""The additive attention masks under which one forward verifies a whole tree (paper 2.1.2).

A row attends to the sequence so far, to itself and to the nodes above it, within its layer's
window. Distances are taken between positions in the text, not between cache slots: siblings share a
position. Relative to the sequence's end a mask is the same at every length, so it is built once,
for the longest prefix, and a step's mask is a slice of it, or gathered from it for a batch.

Letters: N rows of the tree, S columns: the longest prefix, the rows, and one that no row sees; B
    sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs

from pipeline.decoding.dynamic_tree import DynamicTree, GrownTree
from pipeline.decoding.tree import Tree
from pipeline.errors import ConfigError

Masks = Tensor | dict[str, Tensor] | None


def attention_windows(config: PretrainedConfig) -> dict[str, int | None]:
    """The model's kinds of attention layers, each with its sliding window (None: full attention).

    Raises ConfigError for a kind of layer in which no mask can verify a tree.
    """
    windows: dict[str, int | None] = {}
    for kind, settings in zip(
        *get_layer_types_and_kwargs(config.get_text_config(decoder=True)), strict=True
    ):
        window = settings.get("sliding_window")
        if (
            kind not in ("full_attention", "sliding_attention")
            or windows.setdefault(kind, window) != window
        ):
            what = (
                f"The target has layers of kind {kind} (window {window}); no mask can verify a tree"
                " in them."
            )
            fix = "Choose a target with full or sliding-window attention of one width."
            raise ConfigError(what, "target.model", fix)
    return windows


class TreeMasks:
    """The masks of one tree for one model, for prefixes of up to `max_prefix` tokens."""

    def __init__(
        self,
        tree: Tree,
        windows: dict[str, int | None],
        max_prefix: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.max_prefix = max_prefix
        self.num_rows = tree.num_nodes + 1
        self._device = device
        self._last_column = max_prefix + self.num_rows  # which no row sees
        self._masks = {
            kind: _mask_NS(tree, window, max_prefix, dtype).to(device)
            for kind, window in windows.items()
        }

    def after(self, lengths: Sequence[int], tree: object = None) -> Masks:
        """The mask [B, 1, N, longest + N] after prefixes of these lengths; one per kind where a
        model has several.

        Columns beyond a shorter sequence's own rows are hidden.
        """
        if len(lengths) > 1:
            return self.within(
                torch.tensor(lengths, device=self._device), max(lengths) + self.num_rows
            )
        start, columns = self.max_prefix - lengths[0], lengths[0] + self.num_rows
        return self._each(lambda mask_NS: mask_NS[None, None].narrow(3, start, columns))

    def within(self, length_B: Tensor, columns: int, tree: object = None) -> Masks:
        """The same for lengths [B] on the device and a fixed number of columns: [B, 1, N,
        columns].
        """
        first_B1 = self.max_prefix - length_B[:, None]
        column_BS = (first_B1 + torch.arange(columns, device=length_B.device)).clamp_(
            max=self._last_column
        )
        return self._each(lambda mask_NS: mask_NS[:, column_BS].transpose(0, 1)[:, None])

    def _each(self, part: Callable[[Tensor], Tensor]) -> Masks:
        masks = {kind: part(mask_NS) for kind, mask_NS in self._masks.items()}
        # CUDA's fused kernels read masks in aligned vectors; a slice may start anywhere.
        return _one_or_all(
            {kind: mask.contiguous() if mask.is_cuda else mask for kind, mask in masks.items()}
        )


class GrownMasks:
    """The masks of trees that are new in every step, for any prefix; as of `TreeMasks`, which knows
    its tree before.
    """

    def __init__(self, windows: dict[str, int | None], dtype: torch.dtype):
        self._windows, self._dtype = windows, dtype

    def after(self, lengths: Sequence[int], tree: Tree | GrownTree) -> Masks:
        length_B = torch.tensor(lengths, device=tree.depth.device)
        return self.within(length_B, max(lengths) + tree.depth.shape[1], tree)

    def within(self, length_B: Tensor, columns: int, tree: Tree | GrownTree) -> Masks:
        num_rows = tree.depth.shape[1]
        column_BS = (
            torch.arange(columns, device=length_B.device) - length_B[:, None]
        )  # 0 is the root's
        is_prefix_BS, row_BS = column_BS < 0, column_BS.clamp(0, num_rows - 1)
        is_row_BS = (column_BS >= 0) & (column_BS < num_rows)
        sees_BNS = (
            tree.ancestors.take_along_dim(row_BS[:, None], 2) & is_row_BS[:, None]
            | is_prefix_BS[:, None]
        )
        position_BS = torch.where(is_prefix_BS, column_BS, tree.depth.gather(1, row_BS))
        distance_BNS = tree.depth[..., None] - position_BS[:, None]
        hidden = torch.finfo(self._dtype).min
        masks = {}
        for kind, window in self._windows.items():
            visible_BNS = sees_BNS if window is None else sees_BNS & (distance_BNS < window)
            masks[kind] = torch.zeros_like(visible_BNS, dtype=self._dtype).masked_fill_(
                ~visible_BNS, hidden
            )[:, None]
        return _one_or_all(masks)


def masks_for(
    tree: Tree | DynamicTree,
    windows: dict[str, int | None],
    max_prefix: int,
    dtype: torch.dtype,
    device: torch.device,
) -> TreeMasks | GrownMasks:
    """The masks of this tree, or of these trees, for a model with these windows."""
    if isinstance(tree, Tree):
        return TreeMasks(tree, windows, max_prefix, dtype, device)
    return GrownMasks(windows, dtype)


def _one_or_all(masks: dict[str, Tensor]) -> Masks:
    return masks if len(masks) > 1 else next(iter(masks.values()))


def _mask_NS(tree: Tree, window: int | None, max_prefix: int, dtype: torch.dtype) -> Tensor:
    depth_N = tree.depth.cpu()
    positions_S = torch.cat((torch.arange(-max_prefix, 0), depth_N))  # 0 is the root's
    visible_NS = torch.cat(
        (torch.ones(len(depth_N), max_prefix, dtype=torch.bool), tree.ancestors.cpu()), 1
    )
    if window is not None:
        visible_NS &= depth_N[:, None] - positions_S < window
    visible_NS = torch.cat((visible_NS, torch.zeros(len(depth_N), 1, dtype=torch.bool)), 1)
    return torch.zeros(visible_NS.shape, dtype=dtype).masked_fill_(
        ~visible_NS, torch.finfo(dtype).min
    )
