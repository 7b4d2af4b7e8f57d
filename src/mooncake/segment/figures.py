"""What a segment server tells of itself."""

from typing import TYPE_CHECKING

from mooncake.rpc.figures import Histogram, counter, gauge, label
from mooncake.rpc.messages import SegmentInfo
from mooncake.rpc.segment_messages import Family

if TYPE_CHECKING:
    from mooncake.segment.link import MasterLink
    from mooncake.segment.owner import Owner
    from mooncake.segment.streams import Streams


class Traffic:
    """Of tcp streams.  Sums are approximate: streams count without a lock."""

    def __init__(self) -> None:
        self.opened = self.closed = 0
        self.read_bytes = self.written_bytes = 0
        self.failed = self.refused = 0
        self.read_time, self.write_time = Histogram(), Histogram()

    def read(self, size: int, seconds: float) -> None:
        """A request to read was answered."""
        self.read_bytes += size
        self.read_time.observe(seconds)

    def written(self, size: int, seconds: float, refused: int) -> None:
        """A request to write was answered; `refused`: values whose grants no longer stood."""
        self.written_bytes += size
        self.refused += refused
        self.write_time.observe(seconds)


def segment_families(
    info: SegmentInfo, link: "MasterLink", streams: "Streams", owner: "Owner", attached: int, reserved: int
) -> list[Family]:
    """Metrics of one segment; the label says which."""
    traffic, tier = streams.traffic, streams.tier
    of = label("segment", f"{info.segment >> 32}-{info.segment & 0xFFFFFFFF}")
    families = [
        gauge("mooncake_segment_mounted", "Whether a master serves this segment.", link.mounted, of),
        gauge("mooncake_segment_capacity_bytes", "Bytes of the segment.", info.size, of),
        gauge("mooncake_segment_reserved_bytes", "Of those, made resident ahead of use.", reserved, of),
        gauge("mooncake_segment_attached_connections", "Same-host processes that have the memory.", attached, of),
        gauge("mooncake_segment_tcp_streams", "Open data streams.", traffic.opened - traffic.closed, of),
        counter("mooncake_segment_tcp_read_bytes_total", "Bytes read over tcp.", traffic.read_bytes, of),
        counter("mooncake_segment_tcp_written_bytes_total", "Bytes written over tcp.", traffic.written_bytes, of),
        traffic.read_time.family("mooncake_segment_tcp_read_latency", "Reads over tcp (us).", of),
        traffic.write_time.family("mooncake_segment_tcp_write_latency", "Writes over tcp (us).", of),
        counter("mooncake_segment_tcp_failures_total", "Streams that broke, requests refused.", traffic.failed, of),
        counter("mooncake_segment_tcp_refused_writes_total", "Values that came too late.", traffic.refused, of),
        counter("mooncake_segment_mounts_total", "Times that a master took the segment in.", link.mounts, of),
        gauge("mooncake_segment_waiting_kills", "Records whose writer is waited for.", owner.waiting_kills, of),
    ]
    log = tier.log if tier is not None else None
    if tier is None or log is None:
        return families
    families += [
        gauge("mooncake_segment_disk_used_bytes", "Bytes of data files of the SSD tier.", log.used, of),
        gauge("mooncake_segment_disk_values", "Values on disk.", len(log), of),
        gauge("mooncake_segment_disk_queue", "Values that wait to be written to disk.", tier.queued, of),
    ]
    for name, value in log.counts.by_name().items():
        about = f"SSD tier: {name.replace('_', ' ')}."
        families.append(counter(f"mooncake_segment_disk_{name}_total", about, value, of))
    return families
