"""What vLLM 0.25.1 does not tell, and the connector keeps by itself."""

from types import SimpleNamespace as Names

from mooncake.vllm.versions import Allocations, BlockTables, head_axis


def step(new=(), cached=(), resumed=(), finished=()) -> Names:
    """A SchedulerOutput of 0.25.1; requests with their blocks by group."""
    return Names(
        finished_req_ids=set(finished),
        scheduled_new_reqs=[Names(req_id=name, block_ids=blocks) for name, blocks in new],
        scheduled_cached_reqs=Names(
            req_ids=[name for name, _ in cached],
            new_block_ids=[blocks for _, blocks in cached],
            resumed_req_ids=set(resumed),
        ),
    )


def test_tables_are_put_together_from_what_is_new():
    tables = BlockTables(2)
    tables.update(step(new=[("a", ([1, 2], [0, 3]))]))
    assert tables.get("a") == ([1, 2], [0, 3])
    tables.update(step(cached=[("a", ([4], [5]))]))
    tables.update(step(cached=[("a", None)]))
    assert tables.get("a") == ([1, 2, 4], [0, 3, 5])
    tables.update(step(cached=[("a", ([6], [7]))], resumed=["a"]))  # preempted meanwhile: all of it is new
    assert tables.get("a") == ([6], [7])
    tables.update(step(finished=["a"]))
    assert tables.get("a") == ([], [])


def test_tables_that_vllm_tells():
    told = Names(
        get_block_ids=lambda name: ([1], [2]) if name == "a" else None, boundary_state_offloads={"a": [(1, 2, 32)]}
    )
    output = Names(kv_connector_block_state=told)
    tables = BlockTables(2)
    tables.update(output)
    assert tables.get("a") == ([1], [2])
    assert tables.get("b") == ([], [])
    assert tables.states(output) == {"a": [(1, 2, 32)]}


def test_blocks_are_taken_back():
    """By vLLM's manager if it is told, else from vLLM's own lists; then nothing cached may be given."""
    freed: list[int] = []
    pool = Names(free_blocks=freed.extend)
    request = Names(request_id="r", num_computed_tokens=64, skip_reading_prefix_cache=False)
    mine = [[1, 2], [0, 3]]
    allocations = Allocations()
    allocations.bind(pool)
    allocations.release(request, mine)
    assert (freed, mine) == ([2, 1, 3, 0], [[], []])
    assert (request.num_computed_tokens, request.skip_reading_prefix_cache) == (0, True)
    allocations.unloaded(request, 32)

    calls = []
    manager = Names(free=calls.append, record_blocks_for_zeroing=lambda name, start: calls.append((name, start)))
    request = Names(request_id="r", num_computed_tokens=64, skip_reading_prefix_cache=False)
    allocations.bind(pool, manager)
    allocations.release(request, [[1]])
    allocations.unloaded(request, 32)
    assert calls == [request, ("r", 32)]
    assert not request.skip_reading_prefix_cache


def test_where_heads_are():
    assert (head_axis(4), head_axis(5)) == (-3, -2)
