"""Settings of every test: no network, one thread for the tiny models, no progress reports to anything."""

import os
import sys
from pathlib import Path


os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Several test workers share the machine's cores, and tiny models gain nothing from threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parents[1]
for folder in (ROOT, ROOT / "tests", ROOT / "kernels" / "torch-ext"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import torch  # noqa: E402


torch.set_num_threads(1)
# Triton kernels run in its interpreter where there is no GPU. To be said before anything imports Triton.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
