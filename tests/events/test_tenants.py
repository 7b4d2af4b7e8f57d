"""KV events of a master with tenants name a value as its tenant does."""

from mooncake.store import MooncakeDistributedStore, ReplicateConfig

MIB = 1 << 20


def test_events_say_whose_a_value_is(make_publisher, subscribe, cleanup, tmp_path):
    policy = tmp_path / "quotas.yaml"
    policy.write_text("version: 1\ntenants: [{name: a, quota: 8MB}, {name: default, quota: 8MB}]\n")
    master, endpoint = make_publisher("--enable_multi_tenants", f"--tenant_quota_connector_uri={policy}")
    stores = {}
    for tenant, segment in (("default", 32 * MIB), ("a", 0)):
        stores[tenant] = MooncakeDistributedStore()
        cleanup.callback(stores[tenant].close)
        arguments = ("127.0.0.1", "P2PHANDSHAKE", segment, MIB, "tcp", "", master.address)
        assert stores[tenant].setup(*arguments, tenant_id=tenant) == 0
    subscriber = subscribe(endpoint)
    subscriber.join(stores["default"])
    config = ReplicateConfig()
    config.group_ids = ["g"]
    assert stores["a"].put("12", b"v", config) == 0
    assert stores["a"].remove_all(force=True) == 1
    subscriber.wait_for(lambda: [e for e in subscriber.events if e["tenant_id"] == "a"][1:], "both events")
    told = [event for event in subscriber.events if event["tenant_id"] == "a"]
    assert [(e["event_type"], e["object_key"], e["group_id"], e["seq_hashes"]) for e in told] == [
        ("stored", "12", "g", [12]),
        ("removed", "12", "g", [12]),
    ]
