"""The size rule of `device="auto"`."""

import pytest
from doublure_kernels import devices, errors, policy, prefers_gpu


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "_cores", lambda: 2)


def crossover() -> int:
    """The least number of triangles, at 256 x 256, for which a discrete GPU is preferred."""
    return next(t for t in range(1, 100_000) if prefers_gpu(1, t, 65536, True))


def test_nothing_to_draw_is_nothing_for_a_gpu() -> None:
    for shape in ((0, 5, 100), (5, 0, 100), (5, 100, 0)):
        assert not prefers_gpu(*shape, True)


def test_preference_turns_once_with_size() -> None:
    answers = [prefers_gpu(1, 2**k, 4096, True) for k in range(20)]
    assert answers == sorted(answers)
    assert not answers[0]
    assert answers[-1]


def test_only_the_product_counts() -> None:
    edge = crossover()
    assert prefers_gpu(edge, 1, 65536, True)
    assert not prefers_gpu(edge - 1, 1, 65536, True)


def test_the_crossover_follows_from_the_constants() -> None:
    pairs = policy.DISCRETE_NS_A_CALL / (policy.CPU_NS_A_PAIR / 2 - policy.DISCRETE_NS_A_PAIR)
    assert crossover() == int(pairs // 65536) + 1


def test_more_cores_do_more_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prefers_gpu(16, 512, 65536, True)
    monkeypatch.setattr(policy, "_cores", lambda: 64)
    assert not prefers_gpu(16, 512, 65536, True)


def test_an_integrated_gpu_is_preferred_by_its_own_constants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not prefers_gpu(16, 512, 65536, False)
    monkeypatch.setattr(policy, "INTEGRATED_NS_A_PAIR", 0.1)
    assert prefers_gpu(16, 512, 65536, False)


def test_the_kind_that_is_there_decides_where_none_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert prefers_gpu(16, 512, 65536)

    class Integrated:
        discrete = False

    monkeypatch.setattr(devices, "best_gpu", Integrated)
    assert not prefers_gpu(16, 512, 65536)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(errors.SettingError) as caught:
        prefers_gpu(1, -2, 5)
    assert str(caught.value) == "prefers_gpu: expected triangles of 0 or more, got -2"


def test_choosing_an_unknown_device_is_refused() -> None:
    with pytest.raises(errors.DeviceError, match='did you mean "auto"'):
        policy.choose("autto", batch=1, triangles=1, pixels=1)
