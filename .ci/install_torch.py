"""
Install PyTorch into the environment that runs this script, without CUDA where no NVIDIA GPU is.

    python .ci/install_torch.py torch==2.13.0 [INDEX_URL]

On Linux, PyPI's wheels of PyTorch bring gigabytes of CUDA libraries. So, on a machine without an NVIDIA GPU, a dry run
first says what the requirement would bring, and if that includes CUDA, PyTorch's own index of CPU wheels is used. With
INDEX_URL that index is used and nothing is guessed.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def pip(*args: str, **kwargs: bool) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "pip", "install", *args], **kwargs)


def has_nvidia_gpu() -> bool:
    return Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None


def would_bring_cuda(requirement: str) -> bool:
    """Whether the requirement cannot be had from the usual index, or comes with CUDA libraries."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        if pip("--quiet", "--dry-run", "--report", str(report), requirement).returncode:
            return True
        names = {item["metadata"]["name"].lower() for item in json.loads(report.read_text())["install"]}
    return any(name.startswith(("nvidia-", "cuda-")) for name in names)


def main(requirement: str, index: str = "") -> int:
    if not index and not has_nvidia_gpu() and would_bring_cuda(requirement):
        index = CPU_INDEX
    print(f"Installing {requirement} from {index or 'the default index'}", flush=True)
    return pip(requirement, *(["--index-url", index] if index else [])).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
