"""Leaves a thread behind that nobody ends."""

from threading import Event, Thread

from reference_driver import Guard, Sdk, main

CAUGHT_BY = "release/the_process_can_end"


class Broken(Sdk):
    async def _leave(self, guard: Guard) -> None:
        await super()._leave(guard)
        Thread(target=Event().wait).start()


if __name__ == "__main__":
    main(Broken)
