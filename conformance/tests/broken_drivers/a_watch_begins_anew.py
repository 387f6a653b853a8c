"""A watch whose stream was lost misses what came meanwhile."""

from reference_driver import Sdk, VolcanoError, main
from reference_waiting import Filters, Stream

CAUGHT_BY = "watch/goes_on_where_it_stopped"


class Broken(Sdk):
    async def open_stream(self, filters: Filters, last_id: str) -> Stream | VolcanoError:
        del last_id
        return await super().open_stream(filters, "")


if __name__ == "__main__":
    main(Broken)
