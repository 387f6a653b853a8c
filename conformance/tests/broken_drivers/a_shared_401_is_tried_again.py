"""Goes on with a credential that was refused in a shared renewal."""

from reference_driver import Response, Sdk, VolcanoError, main

CAUGHT_BY = "renew/together_refused_as_a_whole"


class Broken(Sdk):
    def _of_the_whole(self, response: Response) -> Response | VolcanoError:
        return response.error() if response.status == 401 else super()._of_the_whole(response)


if __name__ == "__main__":
    main(Broken)
