"""Takes any refusal of a shared renewal as final for all of its leases."""

from reference_driver import Response, Sdk, VolcanoError, main

CAUGHT_BY = "renew/together_passing_answers"


class Broken(Sdk):
    def _of_the_whole(self, response: Response) -> Response | VolcanoError:
        return response if response.status == 409 else super()._of_the_whole(response)


if __name__ == "__main__":
    main(Broken)
