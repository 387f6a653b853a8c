"""Takes the refusal of one lease for that of all."""

from reference_driver import Lease, Response, Sdk, main

CAUGHT_BY = "renew/together_one_is_refused"


class Broken(Sdk):
    def _by_position(self, response: Response, asked: list[Lease]) -> dict[str, Response] | None:
        answers = super()._by_position(response, asked)
        if answers and (refused := [each for each in answers.values() if each.status == 409]):
            return dict.fromkeys(answers, refused[0])
        return answers


if __name__ == "__main__":
    main(Broken)
