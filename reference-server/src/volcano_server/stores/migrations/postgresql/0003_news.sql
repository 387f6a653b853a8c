-- While some server has readers, it moves this on; until then batches leave word of what they did.
-- By the system's clock, not the one that leases are decided by.
ALTER TABLE volcano.store ADD COLUMN watched_until timestamptz NOT NULL DEFAULT '-infinity';

-- What batches have done, one row a batch, for a minute.  A number is given out before its commit,
-- so numbers do not become visible in their order; those of one key do, as its row is locked.
CREATE TABLE volcano.news (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at     timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    events text NOT NULL  -- JSON: [["released", project, key, fencing_token, at, free_at], ...]
);
