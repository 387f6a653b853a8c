"""A guarded write in Redis: a Lua script runs alone, so nothing comes between compare and write.

Lua's numbers end at 2^53, and so do fencing tokens: comparing them as numbers is exact.  Storing
one is not: `tostring` of a number keeps 14 digits.  So the script stores the text that it got.
"""

import redis

WRITE = """
local stored = tonumber(redis.call('HGET', KEYS[1], 'fencing_token') or '0')
if stored > tonumber(ARGV[1]) then
    return 0
end
redis.call('HSET', KEYS[1], 'fencing_token', ARGV[1], 'answer', ARGV[2])
return 1
"""


def connect(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, decode_responses=True)


def write(database: redis.Redis, ticket: int, answer: str, *, fencing_token: int) -> bool:
    """Whether it was written.  False: somebody has written under a later lease; stop."""
    script = database.register_script(WRITE)
    return bool(script(keys=[f"ticket:{ticket}"], args=[fencing_token, answer]))


def read(database: redis.Redis, ticket: int) -> str | None:
    answer = database.hget(f"ticket:{ticket}", "answer")
    return None if answer is None else str(answer)
