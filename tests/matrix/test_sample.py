"""A sample of the matrix with fixed seeds; `scripts/soak` plays the rest."""

import pytest

from tests.matrix.cells import HANDOVER, HANDOVER_HOSTS, HOSTS, LOCAL, ON_HOSTS, REQUESTS, choose
from tests.matrix.permissions import why_no_hosts
from tests.matrix.soak import main, play

netns = pytest.mark.netns


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scene", "seed"),
    [
        (LOCAL, 10),
        pytest.param(HOSTS, 23, marks=netns),
        (REQUESTS, 39),
        (HANDOVER, 37),
        pytest.param(HANDOVER_HOSTS, 5, marks=netns),
    ],
)
def test_nothing_is_wrong_late_lost_or_left(scene, seed, tmp_path):
    if scene in ON_HOSTS and (reason := why_no_hosts()):
        pytest.skip(reason)
    history = choose(seed, (scene,), acts=3)
    outcome = play(history, tmp_path)
    assert not outcome.failures, f"{history}\n" + "\n".join(outcome.failures)
    assert len(outcome.cells) + len(outcome.skipped) == len(history.acts)
    assert outcome.gets > 50
    ended_well = sum(count for code, count in outcome.codes.items() if code.endswith((":0", ":1", ":200", ":whole")))
    assert ended_well > 3


@pytest.mark.parametrize(
    ("arguments", "why"), [(["--minutes", "0"], "greater than 0"), (["--seed", "x"], "invalid int value: 'x'")]
)
def test_what_the_command_refuses(arguments, why, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert why in capsys.readouterr().err
