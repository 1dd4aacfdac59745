"""
Log-probabilities of tokens with the 20 most likely ones against PyTorch, on one GPU.

    python kernels/benchmarks/benchmark_token_logprobs.py [--rows 32]

Prints one JSON object a line. No speed is printed unless the kernel's numbers were right on the device.
"""

import argparse
import json
import sys

import torch

from sparrow_kernels.token_logprobs import token_logprobs
from timing import milliseconds


VOCABULARIES = {"smollm2": 49152, "llama-3.1": 128256, "qwen3": 151936, "gemma-3": 262144}
TOP = 20


def in_torch(logits, tokens):
    """The same from PyTorch operations."""
    log_norm = logits.logsumexp(-1)
    values, ids = logits.topk(TOP, dim=-1)
    return logits.gather(-1, tokens[:, None])[:, 0] - log_norm, (ids, values - log_norm[:, None])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32, help="sequences of the batch")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("This benchmark needs a GPU.", file=sys.stderr)
        return 1
    generator = torch.Generator().manual_seed(0)
    for name, vocab_size in VOCABULARIES.items():
        logits = (torch.randn(arguments.rows, vocab_size, generator=generator) * 4).cuda()
        tokens = torch.randint(vocab_size, (arguments.rows,), generator=generator).cuda()
        found, (ids, values) = token_logprobs(logits, tokens, top=TOP)
        expected, (expected_ids, expected_values) = in_torch(logits.double(), tokens)
        differences = (found - expected).abs().max(), (values - expected_values).abs().max()
        error = max(difference.item() for difference in differences)
        right = error < 1e-4 and torch.equal(ids, expected_ids)
        row = {"op": "token_logprobs", "vocabulary": name, "rows": arguments.rows, "error": error, "right": right}
        row |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        if right:
            row["triton_ms"] = milliseconds(lambda at=(logits, tokens): token_logprobs(*at, top=TOP), 20)
            row["torch_ms"] = milliseconds(lambda at=(logits, tokens): in_torch(*at), 20)
            row["gb_per_s"] = logits.numel() * logits.element_size() / row["triton_ms"] / 1e6
        print(json.dumps(row), flush=True)
        if not right:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
