"""A holder that slept through its lease writes late, and is refused: show.py ENGINE WHERE."""

import sys
from importlib import import_module

from volcano_sdk import VolcanoClient


def main(engine: str, where: str) -> None:
    guarded = import_module(f"guarded_{engine}")
    database = guarded.connect(where)
    with VolcanoClient() as volcano:
        sleeper = volcano.locks.acquire("ticket:1", ttl=30)
        volcano.locks.force_release("ticket:1")  # as if it had slept through its expiry

        with volcano.locks.with_lock("ticket:1", ttl=30) as guard:
            token = guard.lease.fencing_token
            print(f"{engine}: holder", guarded.write(database, 1, "on", fencing_token=token))
            print(f"{engine}: again", guarded.write(database, 1, "on and off", fencing_token=token))

        late = guarded.write(database, 1, "late", fencing_token=sleeper.fencing_token)
        print(f"{engine}: sleeper", late)
    print(f"{engine}:", guarded.read(database, 1))
    database.close()


if __name__ == "__main__":
    main(*sys.argv[1:3])
