"""Gives shared renewals up for a request that was too large."""

from reference_driver import Response, Sdk, VolcanoError, main

CAUGHT_BY = "renew/together_then_singly_this_time"


class Broken(Sdk):
    def _of_the_whole(self, response: Response) -> Response | VolcanoError:
        self.renews_many = False
        return super()._of_the_whole(response)


if __name__ == "__main__":
    main(Broken)
