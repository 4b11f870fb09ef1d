"""What test_scale.py starts under torchrun: three steps of each case; the first process saves what came out.

    torchrun --nproc-per-node 2 tests/versions/parallel_worker.py results.pt CASES

CASES is JSON: a list of [version, [option, ...]]. Saved is a list with one dict a case: "losses" of the steps, and of
{canonical name: tensor} the "gradients" of the first one and "weights", "exp_avg" and "exp_avg_sq" after the last;
"graph" says whether the steps were replayed.
"""

import contextlib
import json
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))
from common.versions import load_version

STEPS = 3


def trained(version, argv):
    """The results of one case; under torchrun, inside its process group."""
    script = load_version(version)
    options = script.parse_options([*argv, "--num-steps", str(STEPS)])
    torch.use_deterministic_algorithms(False)  # version 1 switches it on
    script.set_up_backend(options)
    data, on_gpu = script.load_data(options), options.device.startswith("cuda")
    with torch.cuda.stream(torch.cuda.Stream(options.device)) if on_gpu else contextlib.nullcontext():
        trainer = script.Trainer(options)
        saved = {"weights": script.initial_weights(trainer.config, options.seed), "step": 0}
        trainer.warm_up(*data.batch(0), saved)
        losses = [trainer.run(*data.batch(0))["loss"]]
        parameters = trainer.model.named_parameters()
        gradients = script.canonical_views({n: script.whole(p.grad) for n, p in parameters}, trainer.config)
        gradients = {name: gradient.cpu().clone() for name, gradient in gradients.items()}
        if options.parallel == "peer AdamW":  # which keeps their mean to itself
            everyone = [None] * options.world_size
            torch.distributed.all_gather_object(everyone, gradients)
            gradients = {name: sum(theirs[name].double() for theirs in everyone) / len(everyone) for name in gradients}
        losses += [trainer.run(*data.batch(step))["loss"] for step in range(1, STEPS)]
        state = {
            kind: {n: t.cpu() for n, t in tensors.items()} for kind, tensors in script.training_state(trainer).items()
        }
        return {
            "losses": losses,
            "gradients": gradients,
            **state,
            "graph": trainer.graph is not None,
        }


def main(results, cases):
    first = load_version(1)
    options = first.parse_options([])
    with first.process_group(options):
        found = [trained(version, argv) for version, argv in json.loads(cases)]
        if options.rank == 0:
            torch.save(found, results)
    first.leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
