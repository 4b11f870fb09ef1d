"""Exercise 26: gradients that are averaged while the backward still runs."""

import torch
import torch.distributed as dist


class Bucket:
    """Some weights whose gradients travel together."""

    def __init__(self, weights):
        self.weights = weights
        self.reset()

    def reset(self):
        """Get ready for the next backward."""
        self.missing = len(self.weights)  # gradients that the backward has not computed yet
        self.flat = None
        self.work = None

    def pack(self):
        """Return the gradients in one tensor, with zeros for a weight that has none."""
        if self.missing < 0:
            raise RuntimeError("this bucket has counted more gradients than it has weights: reset() it after each step")
        grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in self.weights]
        return torch.cat([grad.flatten() for grad in grads])

    def wait(self):
        """Return when self.flat holds the sum over all ranks."""
        if self.flat is None and self.work is None:
            raise RuntimeError(
                "this bucket was not sent in this step, or was reset before wait(): finish() sends the rest, with "
                "gradients or without, and then sets self.sent to 0"
            )
        if self.flat is None:
            raise RuntimeError("this bucket has no flat: send_next() keeps the packed gradients there")
        if self.work is None:
            raise RuntimeError(
                "this bucket has nothing to wait for: pass async_op=True to all_reduce, on every rank, and keep what "
                "it returns in work"
            )
        self.work.wait()

    def unpack(self):
        """Make the numbers of self.flat the weights' gradients."""
        if self.flat is None:
            raise RuntimeError("this bucket holds no sums: send it and wait, then unpack() it, then reset() it")
        sizes = [w.numel() for w in self.weights]
        for w, grad in zip(self.weights, self.flat.split(sizes), strict=True):
            w.grad = grad.view(w.shape)


class Averager:
    """Average the gradients of weights over all ranks: buckets of two weights, the last weight first."""

    def __init__(self, weights):
        backwards = weights[::-1]
        self.buckets = [Bucket(backwards[i : i + 2]) for i in range(0, len(backwards), 2)]
        self.sent = 0  # buckets of this step
        for bucket in self.buckets:
            for w in bucket.weights:
                w.register_post_accumulate_grad_hook(lambda w, bucket=bucket: self.note(bucket))

    def note(self, bucket):
        """The backward has just computed the gradient of a weight in this bucket."""
        # TODO: count it, and send every bucket whose turn it is
        # end of TODO

    def send_next(self):
        """Start to sum the next bucket over all ranks, and return at once."""
        # TODO: keep the packed gradients in bucket.flat, and what the call returns in bucket.work
        # end of TODO

    def finish(self):
        """Send what is left, wait for every bucket, and get ready for the next backward."""
        # TODO
        # end of TODO


def forward(x, weights, skip):
    """Apply the layers; one with skip[i] > 0 is left out, as an expert without tokens is."""
    for w, skipped in zip(weights, skip, strict=True):
        if not skipped:
            x = x + torch.tanh(x @ w.T)
    return x


def run(x, target, w, skip):
    """Train w [L, C, C] on x and target [steps, B, C]; return the gradients of all steps and the final weights."""
    weights = [layer.clone().requires_grad_() for layer in w]
    averager = Averager(weights)
    grads = []
    for step in range(len(x)):
        loss = (forward(x[step], weights, skip[step]) - target[step]).square().mean()
        loss.backward()
        averager.finish()
        used = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
        for weight, grad in zip(weights, used, strict=True):
            weight.data -= 0.1 * grad
            weight.grad = None
        grads.append(torch.stack(used))
    return {"grads": torch.stack(grads), "final": torch.stack([weight.detach() for weight in weights])}
