"""Closes its stream before the one that takes its place is open."""

from reference_driver import Sdk, VolcanoError, main
from reference_waiting import Filters, Stream

CAUGHT_BY = "wait/two_of_a_client_share_a_stream"


class Broken(Sdk):
    async def open_stream(self, filters: Filters, last_id: str) -> Stream | VolcanoError:
        self.ears._forget_stream()
        return await super().open_stream(filters, last_id)


if __name__ == "__main__":
    main(Broken)
