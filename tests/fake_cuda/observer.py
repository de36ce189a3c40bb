"""A record of what a program on fake devices makes the host wait for, and of its copies between
devices.

Integers and booleans that no floating-point number decides (labels, positions, counts) are known:
they are also computed on the CPU, so that code whose shapes depend on them runs. Of anything else
the host reads zeros, or the numbers that `Observer.answer` makes up, tensors are equal, and a shape
that depends on it raises DataDependentOutputException.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

aten = torch.ops.aten
# The host waits for these operators' results, or for the shapes of them.
WAITS = {
    aten._local_scalar_dense,
    aten.equal,
    aten.nonzero,
    aten.masked_select,
    aten.bincount,
    aten._unique2,
}
# in inference mode they are called under these names
COMPOSITE = {aten.to, aten.item, aten.is_nonzero, aten.type_as}
COPIES = {aten._to_copy, aten.copy_}
MOST_KNOWN = 1 << 22  # elements of a tensor whose integers are computed


class Observer(TorchDispatchMode):
    """Records, in order:

    `waits`: "tolist", an operator or an event that the host waits for.
    `downloads`: the devices of copies to the host that block it.
    """

    def __init__(self):
        super().__init__()
        self.waits = []
        self.downloads = []
        self.answer = _zeros
        self._is_recording = False
        self._known = WeakIdKeyDictionary()  # the integers of a fake tensor
        self._lost = WeakIdKeyDictionary()  # storages that something unknown was written into

    def clear(self):
        """Forget waits and copies."""
        self.waits.clear()
        self.downloads.clear()

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # nothing compiles here, and the check costs as much as the operator

    @contextmanager
    def recording(self):
        """Context manager: as a CUDA graph is captured, raise RuntimeError for what it cannot
        hold.
        """
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    def wait(self, what):
        """The host waits for the device."""
        if self._is_recording:
            raise RuntimeError(f"{what}: operation not permitted when stream is capturing")
        self.waits.append(what)

    def fetched(self, tensor):
        """`tensor.tolist()`."""
        if tensor.is_cuda:
            self.wait("tolist")
        values = self._values(tensor)
        return self.answer(tensor) if values is None else values.tolist()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        packet, kwargs = operator.overloadpacket, kwargs or {}
        if packet is torch.ops.prim.device:
            return operator(*args, **kwargs)
        if packet in COMPOSITE:
            with self:
                return operator.decompose(*args, **kwargs)
        inputs = _tensors((args, kwargs))
        waits = packet in WAITS
        if waits and any(tensor.is_cuda for tensor in inputs):
            self.wait(packet.__name__)
        is_known = all(self._values(tensor) is not None for tensor in inputs)
        known = None
        if waits and is_known:
            device = inputs[0].device
            known = self._compute(operator, args, kwargs)
            made = tree_map_only(Tensor, lambda one: torch.empty_like(one, device=device), known)
        elif packet is aten.equal:
            made = True
        else:
            made = operator(*args, **kwargs)
            outputs = _tensors(made)
            small = all(_is_integer(one) and one.numel() <= MOST_KNOWN for one in outputs)
            if is_known and outputs and small:
                known = self._compute(operator, args, kwargs)
        if known is not None:
            self._known.update(zip(_tensors(made), _tensors(known), strict=True))
        elif operator._schema.is_mutable:
            self._lose(args[:1], kwargs.get("out"))
        for output in _tensors(made)[:1]:
            self._note_copy(operator, args, kwargs, inputs, str(output.device))
        return made

    def _values(self, tensor):
        """The tensor's integers, on the CPU; None where they are not known."""
        if not isinstance(tensor, FakeTensor):
            return tensor if _is_integer(tensor) else None
        values = self._known.get(tensor)
        return None if values is None or values.untyped_storage() in self._lost else values

    def _compute(self, operator, args, kwargs):
        """The operator's result for known integers."""
        kwargs = dict(kwargs)
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        args, kwargs = tree_map_only(Tensor, self._values, (args, kwargs))
        with _disable_current_modes():
            return operator(*args, **kwargs)

    def _lose(self, *written):
        """Something unknown was written into these, and so into all their views."""
        for tensor in _tensors(written):
            values = self._known.get(tensor)
            if values is not None:
                self._lost[values.untyped_storage()] = True

    def _note_copy(self, operator, args, kwargs, inputs, into):
        if operator.overloadpacket not in COPIES:
            # a kernel takes a number of the host's as an argument
            inputs = [tensor for tensor in inputs if tensor.dim() or tensor.is_cuda]
        if self._is_recording and any(str(tensor.device) != into for tensor in inputs):
            raise RuntimeError(f"{operator} copies to {into} in a recorded step")
        is_flagged = operator is aten.copy_.default and len(args) > 2 and args[2]
        if into == "cpu" and not kwargs.get("non_blocking", is_flagged):
            self.downloads += [str(tensor.device) for tensor in inputs if tensor.is_cuda]


def _tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _is_integer(tensor):
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex


def _zeros(tensor):
    with _disable_current_modes():
        return torch.zeros(tensor.shape, dtype=tensor.dtype).tolist()
