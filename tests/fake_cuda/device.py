"""Fake CUDA devices in the CPU build of torch: tensors with a device, a shape and a dtype, and
without numbers.

Within `fake_cuda` tensors on "cuda:0" to "cuda:7" are those of torch's FakeTensorMode, so a model
of any size costs nothing. Operators on tensors of two devices raise; what the host waits for, and
what is copied between devices, is recorded (observer.py). Peak memory is in ledger.py. There is no
backward.

There are no kernels, graphs, streams or generators. `torch.cuda.is_available()` stays False.
"""

from __future__ import annotations

import shutil
import subprocess
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tests.fake_cuda.observer import Observer

GUARD = "guard.so"


def compile_guard(directory):
    """Compile the library of fake CUDA devices.

    Skips the test where there is no C++ compiler, and in a CUDA build of torch, which has a guard
    of its own.
    """
    compiler = shutil.which("g++") or shutil.which("clang++")
    if torch.version.cuda or compiler is None:
        pytest.skip("fake CUDA needs a CPU build of torch and a C++ compiler (g++)")
    root = Path(torch.__file__).parent
    made, source = str(directory / GUARD), str(Path(__file__).with_name("guard.cpp"))
    paths = (f"-I{root}/include", f"-L{root}/lib", "-lc10")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-std=c++20", source, "-o", made, *paths], check=True
    )


@cache
def load_guard(directory):
    """Give this process fake CUDA devices, for good; only fake tensors notice."""
    # Autograd starts threads for the devices that it finds at its first backward, and then refuses
    # to run after a fork.
    torch.ones(1, requires_grad=True).sum().backward()
    torch.ops.load_library(directory / GUARD)


@contextmanager
def fake_cuda(directory):
    """Context manager: make every new tensor fake, on the CPU too, and allow CUDA devices.

    Yields an observer that records the program's syncs and transfers. `compile_guard` has filled
    the directory.
    """
    load_guard(directory)
    observer = Observer()
    patches = [
        mock.patch.object(FakeTensor, "tolist", lambda tensor: observer.fetched(tensor)),
        mock.patch.object(nn.Module, "_apply", _apply),
        mock.patch.object(torch, "Generator", FakeGenerator),
        mock.patch.multiple(torch.cuda, **_stubs(observer)),
        mock.patch("pipeline.decoding.decoder.graph_capture_for", lambda model: None),
        # Else transformers believes that it is traced: it would pass a full mask, and expand keys
        # and values.
        mock.patch("transformers.utils.import_utils.is_fake_tensor", lambda tensor: False),
    ]
    modes = [FakeTensorMode(allow_non_fake_inputs=True), observer]
    with ExitStack() as stack:
        for each in (*patches, *modes):
            stack.enter_context(each)
        yield observer


class FakeGenerator(torch.Generator):
    """A generator of any device; random numbers on a fake device are not drawn."""

    def __new__(cls, device="cpu"):
        made = super().__new__(cls)
        made.its_device = torch.device(device)
        return made

    @property
    def device(self):
        return self.its_device


class FakeGraphs:
    """A stand-in for `CudaGraphs`: it captures a step by running it, and a replay does nothing.

    Raises RuntimeError where a CUDA graph could not hold the step: it waits, copies, or reads
    tensors of the host.
    """

    def __init__(self, observer):
        self._observer = observer
        self.num_captured = 0

    def run(self, function):
        function()

    def rehearse(self, function):
        with self._observer.recording():
            function()

    def capture(self, function):
        self.rehearse(function)
        self.num_captured += 1
        return lambda: None


def _stubs(observer):
    """The functions of `torch.cuda` that the program calls."""
    return {
        "is_bf16_supported": lambda including_emulation=True: True,
        "synchronize": lambda device=None: observer.wait("synchronize"),
    }


def _apply(module, function, recurse=True):
    """`Module._apply`, which swaps parameters in place and cannot where a weak reference to them
    exists.
    """
    for child in module.children() if recurse else ():
        child._apply(function)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            moved = function(parameter.detach())
            module._parameters[name] = nn.Parameter(moved, parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module
