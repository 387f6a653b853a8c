"""Takes a server without shared renewals for one in trouble."""

from reference_driver import Response, Sdk, VolcanoError, main

CAUGHT_BY = "renew/together_then_singly_for_ever_405"


class Broken(Sdk):
    def _of_the_whole(self, response: Response) -> Response | VolcanoError:
        return response.error() if response.status == 405 else super()._of_the_whole(response)


if __name__ == "__main__":
    main(Broken)
