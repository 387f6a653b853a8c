"""Takes a passing failure for a refusal."""

from reference_driver import Sdk, main

CAUGHT_BY = "renew/survives_503"


class Broken(Sdk):
    final = frozenset({400, 401, 403, 404, 409, 500, 503})


if __name__ == "__main__":
    main(Broken)
