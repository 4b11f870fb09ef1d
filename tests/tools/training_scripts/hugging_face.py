"""Train Hugging Face's Llama with torch.compile in bf16, and print the time of a step: hugging_face.py [STEPS]."""

import statistics
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
if DEVICE == "cpu":
    SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, use_cache=False, **SIZES)).to(DEVICE)
compiled = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=DEVICE == "cuda")
times = []
for step in range(int(sys.argv[1]) if len(sys.argv) > 1 else 12):
    begin = time.perf_counter()
    tokens = torch.randint(1000, (8, 128), device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = compiled(input_ids=tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{step} {loss.item():.8f}", flush=True)
    times.append(1e3 * (time.perf_counter() - begin))
print(f"step {statistics.median(times[5:]):.3f} ms, median")
