"""What a program on fake devices makes the host wait for, and what it copies between devices.

Integers and booleans that no floating-point number decides (labels, positions, counts) are known:
they are computed beside, on the CPU, so that code whose shapes depend on them runs. Of anything
else the host reads zeros, or what `Observer.answer` makes up, tensors are equal, and a shape that
depends on it raises DataDependentOutputException.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
COMPOSITE = {
    aten.to,
    aten.item,
    aten.is_nonzero,
    aten.type_as,
}  # in inference mode they are called under these names
COPIES = {aten._to_copy, aten.copy_}
MOST_KNOWN = 1 << 22  # elements of a tensor whose integers are computed


class Observer(TorchDispatchMode):
    """Notes, in order:

    `waits`: for what the host waited: "tolist", an operator, an event.
    `uploads`, `downloads`: copies between the host and a device that block the host, as "cpu ->
    cuda:0". `transfers`: all copies between two devices, those included. `calls`: how often each
    operator ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.uploads: list[str] = []
        self.downloads: list[str] = []
        self.transfers: list[str] = []
        self.calls: Counter[str] = Counter()
        self.answer: Callable[[Tensor], Any] = _zeros
        self._is_recording = False
        self._known: Any = WeakIdKeyDictionary()  # fake tensor: its integers
        self._lost: Any = (
            WeakIdKeyDictionary()
        )  # storages of integers that something unknown was written into

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing compiles here, and the check costs as much as the operator

    @contextmanager
    def recording(self) -> Iterator[None]:
        """As a CUDA graph is captured: what it cannot hold raises RuntimeError."""
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    def wait(self, what: str) -> None:
        """The host waits for the device."""
        if self._is_recording:
            raise RuntimeError(f"{what}: operation not permitted when stream is capturing")
        self.waits.append(what)

    def fetched(self, tensor: Tensor) -> Any:
        """`tensor.tolist()`."""
        if tensor.is_cuda:
            self.wait("tolist")
        values = self._values(tensor)
        return self.answer(tensor) if values is None else values.tolist()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        packet, kwargs = operator.overloadpacket, kwargs or {}
        if packet is torch.ops.prim.device:
            return operator(*args, **kwargs)
        if packet in COMPOSITE:
            with self:
                return operator.decompose(*args, **kwargs)
        self.calls[packet.__name__] += 1
        inputs = _tensors((args, kwargs))
        waits = packet in WAITS
        if waits and any(tensor.is_cuda for tensor in inputs):
            self.wait(packet.__name__)
        decides = all(self._values(tensor) is not None for tensor in inputs)
        if waits and decides:
            known = self._compute(operator, args, kwargs)
            made = tree_map_only(
                Tensor, lambda one: torch.empty_like(one, device=inputs[0].device), known
            )
        elif packet is aten.equal:
            known = made = True
        else:
            made = operator(*args, **kwargs)
            outputs = _tensors(made)
            decides &= bool(outputs) and all(
                _is_integer(one) and one.numel() <= MOST_KNOWN for one in outputs
            )
            known = self._compute(operator, args, kwargs) if decides else None
        if known is None:
            self._forget_written(operator, args, kwargs)
        else:
            self._known.update(zip(_tensors(made), _tensors(known), strict=True))
        self._note_copies(operator, args, kwargs, inputs, _tensors(made))
        return made

    def _values(self, tensor: Tensor) -> Tensor | None:
        """The tensor's integers, on the CPU; None where nobody knows them."""
        if not isinstance(tensor, FakeTensor):
            return tensor if _is_integer(tensor) else None
        values = self._known.get(tensor)
        return None if values is None or values.untyped_storage() in self._lost else values

    def _compute(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What the operator makes of known integers."""
        if "device" in kwargs:
            kwargs = kwargs | {"device": torch.device("cpu")}
        if "pin_memory" in kwargs:
            kwargs = kwargs | {"pin_memory": False}
        with _disable_current_modes():
            return operator(
                *tree_map_only(Tensor, self._values, args),
                **tree_map_only(Tensor, self._values, kwargs),
            )

    def _forget_written(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Something unknown was written into these, and so into all their views."""
        for argument, value in zip(operator._schema.arguments, args, strict=False):
            if argument.alias_info and argument.alias_info.is_write:
                self._lose(value)
        for argument in operator._schema.arguments[len(args) :]:
            if argument.alias_info and argument.alias_info.is_write:
                self._lose(kwargs.get(argument.name))

    def _lose(self, written: Any) -> None:
        for tensor in _tensors(written):
            if (values := self._known.get(tensor)) is not None:
                self._lost[values.untyped_storage()] = True

    def _note_copies(
        self,
        operator: Any,
        args: Any,
        kwargs: dict[str, Any],
        inputs: list[Tensor],
        outputs: list[Tensor],
    ) -> None:
        is_copy = operator.overloadpacket in COPIES
        # A kernel takes a number of the host's as an argument; a copy of one is a copy.
        devices = {
            tensor.device: None for tensor in inputs if is_copy or tensor.dim() or tensor.is_cuda
        }
        if self._is_recording and any(device.type == "cpu" for device in devices):
            raise RuntimeError(
                f"{operator} reads a tensor of the host: a graph would read it where it was"
            )
        devices |= {tensor.device: None for tensor in outputs}
        if len(devices) < 2:
            return
        into = outputs[0].device
        (source, *_) = (device for device in devices if device != into)
        if self._is_recording:
            raise RuntimeError(f"{operator} copies from {source} to {into} in a recorded step")
        copy = f"{source} -> {into}"
        self.transfers.append(copy)
        non_blocking = kwargs.get(
            "non_blocking", operator is aten.copy_.default and len(args) > 2 and args[2]
        )
        if "cpu" in (source.type, into.type) and not non_blocking:
            (self.uploads if into.type == "cuda" else self.downloads).append(copy)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _is_integer(tensor: Tensor) -> bool:
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex


def _zeros(tensor: Tensor) -> Any:
    with _disable_current_modes():
        return torch.zeros(tensor.shape, dtype=tensor.dtype).tolist()
