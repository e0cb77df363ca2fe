"""The size rule of `device="auto"`."""

import pytest
from doublure_kernels import devices, errors, policy, prefers_gpu


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "_cores", lambda: 2)


def crossover(discrete: bool) -> int:
    """The least number of triangles, at 256 x 256, for which the GPU is preferred."""
    return next(t for t in range(1, 100_000) if prefers_gpu(1, t, 65536, discrete))


def test_nothing_to_draw_is_nothing_for_a_gpu() -> None:
    for shape in ((0, 5, 100), (5, 0, 100), (5, 100, 0)):
        assert not prefers_gpu(*shape, True)


@pytest.mark.parametrize("discrete", [True, False])
def test_preference_turns_once_with_size(discrete: bool) -> None:
    answers = [prefers_gpu(1, 2**k, 4096, discrete) for k in range(20)]
    assert answers == sorted(answers)
    assert not answers[0]
    assert answers[-1]


def test_only_the_product_counts() -> None:
    assert prefers_gpu(16, 32, 65536, True) == prefers_gpu(32, 16, 65536, True)
    edge = crossover(True)
    assert prefers_gpu(edge, 1, 65536, True)
    assert not prefers_gpu(edge - 1, 1, 65536, True)


def test_the_crossovers_follow_from_the_constants() -> None:
    for discrete, call, pair in (
        (True, policy.DISCRETE_NS_A_CALL, policy.DISCRETE_NS_A_PAIR),
        (False, policy.INTEGRATED_NS_A_CALL, policy.INTEGRATED_NS_A_PAIR),
    ):
        pairs = call / (policy.CPU_NS_A_PAIR / 2 - pair)
        assert crossover(discrete) == int(pairs // 65536) + 1


def test_more_cores_move_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prefers_gpu(1, 8, 65536, False)
    monkeypatch.setattr(policy, "_cores", lambda: 64)
    assert not prefers_gpu(1, 8, 65536, False)
    assert not prefers_gpu(16, 512, 65536, False)


def test_the_kind_that_is_there_decides_where_none_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    edge = next(
        t for t in range(1, 1000) if prefers_gpu(1, t, 4096, True) != prefers_gpu(1, t, 4096, False)
    )
    assert prefers_gpu(1, edge, 4096) == prefers_gpu(1, edge, 4096, True)

    class Integrated:
        discrete = False

    monkeypatch.setattr(devices, "best_gpu", Integrated)
    assert prefers_gpu(1, edge, 4096) == prefers_gpu(1, edge, 4096, False)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(errors.SettingError) as caught:
        prefers_gpu(1, -2, 5)
    assert str(caught.value) == "prefers_gpu: expected triangles of 0 or more, got -2"


def test_choosing_an_unknown_device_is_refused() -> None:
    with pytest.raises(errors.DeviceError, match='did you mean "auto"'):
        policy.choose("autto", batch=1, triangles=1, pixels=1)
