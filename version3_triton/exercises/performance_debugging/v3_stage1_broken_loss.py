#!/usr/bin/env python3
"""Stage 1: version 3 with the weight initialisation below. Find the fault and repair it.

python v3_stage1_broken_loss.py                # train; options of tiny_llama_v3.py are passed on
python v3_stage1_broken_loss.py --check        # is it repaired?
python v3_stage1_broken_loss.py --reveal       # explain it
"""

import math
import sys

from stage_tools import load_v3, main

v3 = load_v3()
torch = v3.torch


@torch.no_grad()
def initialize(model, options):
    """Draw the initial weights, as the constructors of PyTorch's modules do."""
    generator = torch.Generator().manual_seed(options.seed)
    for name, view in v3.canonical_views(dict(model.named_parameters()), options.model).items():
        if view.ndim == 1:
            view.fill_(1)
        elif name.startswith("embed"):
            view.copy_(torch.empty(view.shape).normal_(0, 1, generator=generator))
        else:
            bound = 1 / math.sqrt(view.shape[1])
            view.copy_(torch.empty(view.shape).uniform_(-bound, bound, generator=generator))


v3.initialize = initialize

if __name__ == "__main__":
    sys.exit(main(v3, 1))
