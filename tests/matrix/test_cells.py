"""The matrix itself: seeds, and that no cell is left out without a reason."""

from pathlib import Path

import pytest

from tests.matrix.cells import FAULTS, SCENES, VICTIMS, WORKS, cells, choose, happens_in, table, why_not

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


def test_a_seed_is_one_history():
    for seed in range(50):
        assert choose(seed) == choose(seed)
    assert len({str(choose(seed)).partition(":")[2] for seed in range(50)}) == 50


def test_every_cell_is_played_somewhere_or_has_a_reason():
    played = {
        cell
        for scene in SCENES
        for disk in (False, True)
        for etcd in (False, True)
        for cell in happens_in(scene, disk, etcd)
    }
    for victim in VICTIMS:
        for fault in FAULTS:
            for work in WORKS:
                assert ((victim, fault, work) in played) == (not why_not(victim, fault, work))


def test_seeds_reach_all_cells():
    reached = {(act.victim, act.fault, act.work) for seed in range(3000) for act in choose(seed).acts}
    assert reached == set(cells())


def test_the_documents_table_is_this_one():
    assert table() in PAGE.read_text()


@pytest.mark.parametrize("scene", SCENES)
def test_a_scene_can_be_asked_for(scene):
    history = choose(5, (scene,), acts=2)
    assert (history.scene, len(history.acts)) == (scene, 2)
