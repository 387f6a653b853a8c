"""How many event streams there are, and what they carry, for /metrics."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from volcano_server.hub import Hub


class EventMetrics(Collector):
    """Reads the plain numbers of the hub when somebody asks."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "volcano_lock_event_streams", "Event streams that are open", len(self._hub)
        )
        ended = CounterMetricFamily(
            "volcano_lock_event_streams_ended", "Event streams that are over", labels=("reason",)
        )
        for reason, number in self._hub.ended.items():
            ended.add_metric((reason.value,), number)
        yield ended
        events = CounterMetricFamily(
            "volcano_lock_events", "Events that somebody may have listened for", labels=("event",)
        )
        for event, number in self._hub.published.items():
            events.add_metric((event,), number)
        yield events
        yield CounterMetricFamily(
            "volcano_lock_events_sent", "Events, once for each stream", self._hub.sent
        )
