"""Gives up the leases whose shared renewal got no answer."""

from reference_driver import Guard, Sdk, Shared, TransportError, main

CAUGHT_BY = "renew/together_a_lost_answer"


class Broken(Sdk):
    async def _renew_together(self, guards: list[Guard]) -> Shared:
        shared = await super()._renew_together(guards)
        if isinstance(shared.whole, TransportError):
            for guard in guards:
                guard.lose(shared.whole)
        return shared


if __name__ == "__main__":
    main(Broken)
