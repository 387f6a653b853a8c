"""Checks keys with ^ and $, which let a newline through."""

import re

from reference_driver import Sdk, main

CAUGHT_BY = "acquire/a_wrong_key_is_never_sent"


class Broken(Sdk):
    def _is_key(self, key: str) -> bool:
        return re.match(r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$", key) is not None


if __name__ == "__main__":
    main(Broken)
