"""What the scripts of both flavours answer to `renew_many`."""

import json
from typing import Any


class Items(dict[str, dict[str, Any]]):
    """By key, what an item says instead of a good renewal: `Items(a={"code": "x"})`."""

    def body(self, asked: bytes) -> str:
        items = [{"key": key, **self.get(key, GOOD_ITEM)} for key in keys(asked)]
        return json.dumps({"leases": items})


GOOD_ITEM: dict[str, Any] = {"expires_at": "2026-11-29T12:00:00.000Z", "fencing_token": 7}
LOST: dict[str, Any] = {"error": "A sentence.", "code": "lock_ownership_lost"}


def keys(asked: bytes) -> list[str]:
    """Of the leases in a request's body; none where it is about one lease."""
    body = json.loads(asked) if asked else {}
    return [lease["key"] for lease in body.get("leases", [])]
