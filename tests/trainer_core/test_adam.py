"""Our Adam is torch's, step for step, and goes on from copied moments as if never interrupted."""

import torch
from doublure_trainer.adam import Adam


def parameters() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(n, generator=generator).requires_grad_() for n in (7, 64, 3)]


def backward(values: list[torch.Tensor], step: int) -> None:
    sum(((v - 0.1 * step) ** 3).sum() for v in values).backward()  # type: ignore[union-attr]


def test_steps_are_those_of_torch() -> None:
    ours, theirs = parameters(), parameters()
    rates = [0.02, 0.01, 0.02]
    adam = Adam(ours, rates)
    reference = torch.optim.Adam(
        [{"params": [p], "lr": r} for p, r in zip(theirs, rates, strict=True)],
        betas=(0.9, 0.99),
        fused=True,
    )
    for step in range(20):
        scale = 1.0 / (1 + step)
        for group, rate in zip(reference.param_groups, rates, strict=True):
            group["lr"] = rate * scale
        adam.forget_gradients()
        reference.zero_grad()
        backward(ours, step)
        backward(theirs, step)
        adam.step(scale)
        reference.step()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert adam.steps == 20


def test_copied_moments_go_on_the_same() -> None:
    values = parameters()
    adam = Adam(values, [0.02] * 3)
    for step in range(5):
        adam.forget_gradients()
        backward(values, step)
        adam.step()
    copies = [v.detach().clone().requires_grad_() for v in values]
    other = Adam(copies, [0.02] * 3, steps=adam.steps, first=adam.first, second=adam.second)
    for step in range(5, 10):
        for a, vs in ((adam, values), (other, copies)):
            a.forget_gradients()
            backward(vs, step)
            a.step()
    assert all(torch.equal(a, b) for a, b in zip(values, copies, strict=True))
