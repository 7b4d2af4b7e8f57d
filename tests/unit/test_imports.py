"""What the drop-in modules import before anything is set up: a private server boots while the rest is imported."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["mooncake.store", "mooncake.engine"])
def test_nothing_large(module):
    program = f"import sys, {module}; print({{'numpy', 'torch', 'aiohttp'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_master_without_kv_events():
    program = "import sys, mooncake.cli.master; print({'numpy', 'aiohttp', 'zmq'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("module", ["mooncake.segment.server", "mooncake.cli.master", "mooncake.store"])
def test_elections_are_for_those_who_hold_them(module):
    program = f"import sys, {module}; print({{'mooncake.election.leader', 'redis', 'etcd3gw'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_what_needs_numpy_comes_when_it_is_named():
    import mooncake.store

    assert mooncake.store.EngramStore.__name__ == "EngramStore"
    with pytest.raises(AttributeError, match="no attribute 'EngramShop'"):
        _ = mooncake.store.EngramShop
