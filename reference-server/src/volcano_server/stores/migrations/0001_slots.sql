-- A slot is kept by its key; the last fencing token stays when the lease is gone.
-- No second index: each would be written with each renewal, and only the sweeper could use it.
-- All times are microseconds of the store's clock.
CREATE TABLE slots (
    project       TEXT    NOT NULL,
    key           TEXT    NOT NULL,
    fencing_token INTEGER NOT NULL,
    changed_at    INTEGER NOT NULL,
    token         TEXT,     -- of the lease; these three are null together when there is none
    expires_at    INTEGER,
    hard_deadline INTEGER,
    PRIMARY KEY (project, key),
    CHECK ((token IS NULL) = (expires_at IS NULL) AND (token IS NULL) = (hard_deadline IS NULL))
) STRICT, WITHOUT ROWID;

-- One row: the clock at the last commit, and the highest fencing token of any slot ever swept.
CREATE TABLE store (
    only_row      INTEGER PRIMARY KEY CHECK (only_row = 1),
    boot_id       TEXT,     -- these three are null together before the first server starts
    elapsed       INTEGER,
    now           INTEGER,
    highest_swept INTEGER NOT NULL
) STRICT;

INSERT INTO store (only_row, highest_swept) VALUES (1, 0);
