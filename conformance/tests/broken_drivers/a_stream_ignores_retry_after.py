"""Opens its stream again before the server wants it."""

from reference_driver import Sdk, VolcanoError, main
from reference_waiting import Filters, Stream

CAUGHT_BY = "wait/a_busy_stream_waits_for_its_turn"


class Broken(Sdk):
    async def open_stream(self, filters: Filters, last_id: str) -> Stream | VolcanoError:
        outcome = await super().open_stream(filters, last_id)
        if isinstance(outcome, VolcanoError):
            outcome.facts.pop("retry_after", None)
        return outcome


if __name__ == "__main__":
    main(Broken)
