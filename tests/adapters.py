"""What the tests of DistillSparse share: policies with and without adapters of their own, and a LoRA with an effect."""

import torch
from peft import LoraConfig, get_peft_model

from rollouts import endless
from sparrow_trl.distill import SparrowAdapter


POLICIES = ("plain", "lora", "two loras", "tied")


def policy(kind: str):
    """A tiny model in evaluation mode."""
    if kind == "plain":
        return endless()
    if kind == "tied":
        return endless(tie_word_embeddings=True)
    config = {"r": 2, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    torch.manual_seed(3)
    model = get_peft_model(endless(), LoraConfig(**config), adapter_name="policy")
    if kind == "two loras":
        model.add_adapter("other", LoraConfig(**config))
        model.base_model.set_adapter(["policy", "other"])
    return model.eval()


def randomise(adapter: SparrowAdapter, seed: int = 5, std: float = 0.1) -> SparrowAdapter:
    """Give the LoRA an effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for update in adapter.updates:
            update.B.normal_(std=std, generator=generator)
    return adapter
