"""The device's step and its rows, here on the CPU: all but the capture is the same there."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from doublure_trainer import learner as learner_module
from doublure_trainer.learner import Learner
from doublure_trainer.on_device import DeviceStep, Mirror
from doublure_trainer.replay import Replay
from doublure_trainer.slices import TRAIN
from torch import Tensor

from .streams import PLAN, frame, small, stream

CPU = torch.device("cpu")


def filled() -> Replay:
    replay = Replay(PLAN, train_rows=1 << 13)
    for rows in stream(96, 128):
        replay.add(rows)
    return replay


def test_a_mirror_holds_the_replays_rows_and_follows_it() -> None:
    replay = filled()
    mirror = Mirror(replay, CPU)
    assert mirror.empty
    mirror.refresh()
    for _ in range(2):
        capacity, slots = mirror.capacity, len(mirror.rows)
        assert (capacity, slots) == replay.watch()
        held = replay._reservoirs[TRAIN]
        used = np.concatenate(
            [np.arange(i * capacity, i * capacity + n) for i, n in enumerate(held.sizes)]
        )
        np.testing.assert_array_equal(mirror.rows[used].numpy(), held.rows_at(used))
        np.testing.assert_array_equal(mirror.sizes.numpy(), held.sizes)
        for t in np.linspace(-1, 1, 40):
            replay.add(frame(float(t), 64, seed=5))
        mirror.refresh()


def test_a_mirror_draws_training_rows_and_more_of_the_bad_ones() -> None:
    mirror = Mirror(filled(), CPU)
    mirror.refresh()
    config = small(tries=8, error_share=1.0, error_power=1.0)
    right = mirror.rows[:, 0] > 0
    mirror.errors.copy_(torch.where(right, 4.0, 1.0))
    rows, weights, slots = mirror.draw(1 << 14, torch.Generator().manual_seed(0), config)
    assert (PLAN.kind_of(rows[:, 2].numpy()) == TRAIN).all()
    assert torch.equal(rows, mirror.rows[slots])
    assert float(weights.mean()) == pytest.approx(1.0, abs=1e-5)
    # Half of the rows, four times as likely; what the weights say takes it back.
    assert float(right[slots].float().mean()) == pytest.approx(0.8, abs=0.02)
    assert float((weights * right[slots]).mean()) == pytest.approx(0.5, abs=0.02)


def test_errors_that_are_not_finite_leave_no_trace() -> None:
    mirror = Mirror(filled(), CPU)
    mirror.refresh()
    slots = torch.arange(64)
    errors = torch.full((64,), 4.0)
    errors[::3], errors[1::3] = math.nan, math.inf
    mirror.learned(slots, errors)
    assert torch.isfinite(mirror.errors).all()
    assert float(mirror.unknown) == 2.0
    mirror.learned(slots, torch.full((64,), math.nan))
    assert torch.isfinite(mirror.errors).all()
    assert float(mirror.unknown) == 2.0
    _, weights, found = mirror.draw(512, torch.Generator().manual_seed(0), small())
    assert len(torch.unique(found)) > 300
    assert torch.isfinite(weights).all()


@pytest.mark.parametrize("name", ["grid", "planes", "fine"])
def test_it_does_what_a_learner_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_module, "ready", lambda: False)
    config = small(growth=(), smoothing=0.01)
    ours, theirs = (Learner(config.grid, config, device=CPU, seed=3, name=name) for _ in range(2))
    mirror = Mirror(filled(), CPU)
    mirror.refresh()
    step = DeviceStep(
        ours.module,  # type: ignore[arg-type]
        mirror,
        config,
        ours._average,
        ours._optimizer,
        batch=256,
        step=0,
        rate=1.0,
        smoothing=ours._smoothing,
        seed=0,
    )
    drawn: list[tuple[Tensor, Tensor, Tensor]] = []
    original = mirror.draw

    def remembered(*arguments: object) -> tuple[Tensor, Tensor, Tensor]:
        drawn.append(original(*arguments))  # type: ignore[arg-type]
        return drawn[-1]

    monkeypatch.setattr(mirror, "draw", remembered)
    for i in range(40):
        step.body(smooth=(i + 1) % 4 == 0)
        rows, weights, slots = drawn[-1]
        loss = theirs.step(rows.numpy(), weights.numpy())
        assert float(step.loss) == pytest.approx(loss, rel=1e-3)
        assert theirs.errors is not None
        np.testing.assert_allclose(
            mirror.errors[slots].square().numpy(), theirs.errors, rtol=2e-2, atol=1e-5
        )
    found, wanted = ours.tensors(), theirs.tensors()
    for key in wanted:
        np.testing.assert_allclose(
            found[key].astype(np.float32), wanted[key].astype(np.float32), atol=2e-3
        )
