import pytest

from zeromesh.base.precision import LossScale
from zeromesh.shard.optim.scaler import LossScaler

GOOD, BAD = ".", "x"

# Policy, steps, and the scale after each of them, as worked out by hand from DeepSpeed's rules: a window is full when
# that many good steps lie between the current step and the last overflow.
HISTORIES = [
    (LossScale(initial_power=4, window=2, hysteresis=1), "........", [16, 16, 32, 32, 64, 64, 128, 128]),
    (LossScale(initial_power=4, window=2, hysteresis=1), "xx......", [8, 4, 4, 4, 8, 8, 16, 16]),
    (LossScale(initial_power=4, window=2, hysteresis=2), "xxx.x", [16, 8, 4, 4, 2]),
    (LossScale(initial_power=4, window=2, hysteresis=2), "x.x...x", [16, 16, 8, 8, 8, 16, 16]),
    (LossScale(initial_power=4, window=2, hysteresis=3), "xx...xxx", [16, 16, 16, 16, 32, 32, 32, 16]),
    (
        LossScale(initial_power=4, window=9, hysteresis=2, consecutive_hysteresis=True),
        "x.x.xx",
        [16, 16, 16, 16, 16, 8],
    ),
    (LossScale(initial_power=4, window=9, hysteresis=1, minimum=5.0), "xx.", [8, 5, 5]),
    (LossScale(initial_power=1, window=1, hysteresis=1), "....x..", [2, 4, 8, 16, 8, 8, 16]),
    (LossScale(static=128.0), "x..x", [128, 128, 128, 128]),
]


def play(scaler: LossScaler, steps: str) -> list[float]:
    scales = []
    for step in steps:
        scaler.update(step == BAD)
        scales.append(scaler.scale)
    return scales


@pytest.mark.parametrize(("policy", "steps", "scales"), HISTORIES)
def test_the_scale_moves_as_worked_out_by_hand(policy, steps, scales):
    assert play(LossScaler(policy), steps) == scales


@pytest.mark.parametrize(("policy", "steps", "scales"), HISTORIES)
def test_a_resumed_scale_moves_on_as_before(policy, steps, scales):
    for cut in range(len(steps)):
        before, after = LossScaler(policy), LossScaler(policy)
        play(before, steps[:cut])
        after.load_state_dict(before.state_dict())
        assert play(after, steps[cut:]) == scales[cut:]


def test_the_first_scale_is_the_policy():
    assert LossScaler(LossScale()).scale == 65536.0
    assert LossScaler(LossScale(static=8.0)).scale == 8.0


def test_an_overflow_at_the_minimum_raises_with_a_remedy():
    scaler = LossScaler(LossScale(initial_power=1, hysteresis=1))
    scaler.update(True)
    assert scaler.scale == 1.0
    with pytest.raises(FloatingPointError, match="minimum loss scale 1: .*bf16"):
        scaler.update(True)


def test_a_static_scale_stays_as_configured_when_resumed():
    scaler = LossScaler(LossScale(static=8.0))
    scaler.load_state_dict(LossScaler(LossScale(static=4.0)).state_dict())
    assert scaler.scale == 8.0
