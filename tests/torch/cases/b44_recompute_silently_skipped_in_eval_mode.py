"""HF checkpointing is silently off when the module is in eval(), though grads still flow (LoRA/textual inversion/guidance).

Made after huggingface/diffusers#9850, #9878, #1848; victorchall/EveryDream2trainer#246.
"""

import torch


def make():
    from transformers import GPT2Config, GPT2LMHeadModel

    m = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=32, use_cache=False)).eval()
    return (m, torch.randint(0, 64, (2, 9)), lambda m, b: m(input_ids=b, labels=b).loss)
