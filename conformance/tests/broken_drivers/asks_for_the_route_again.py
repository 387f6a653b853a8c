"""Forgets that the server has no shared renewals."""

from reference_driver import Response, Sdk, VolcanoError, main

CAUGHT_BY = "renew/together_then_singly_for_ever_404"


class Broken(Sdk):
    def _of_the_whole(self, response: Response) -> Response | VolcanoError:
        whole = super()._of_the_whole(response)
        self.renews_many = True
        return whole


if __name__ == "__main__":
    main(Broken)
