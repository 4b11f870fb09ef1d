"""Find out how a device rounds the float32 inputs of its matmuls: TF32 keeps 10 fraction bits of them."""


def multiply(a, b):
    return a @ b


def mean_signed_error(device):
    """Return the mean relative error of float32 matmuls of numbers from 1 to 2, in which no errors cancel."""
    import torch

    generator = torch.Generator().manual_seed(0)
    a, b = (1 + torch.rand(2, 512, 512, generator=generator)).to(device)
    exact = a.double().cpu() @ b.double().cpu()
    return ((multiply(a, b).double().cpu() - exact) / exact).mean().item()


def rounds_to_tf32(device):
    """Return True if matmuls keep 10 fraction bits of float32 inputs, as TF32 does: 1 + 2**-12 needs 12."""
    import torch

    x = torch.full((256, 256), 1 + 2**-12, device=device)
    return bool((multiply(x, torch.eye(256, device=device)) == 1).all())
