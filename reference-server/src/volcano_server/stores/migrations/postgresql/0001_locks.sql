-- A slot is kept by its key; the last fencing token stays when the lease is gone.
-- All times are microseconds of the database's wall clock.  COLLATE "C": the order of the keys, in
-- which rows are locked, is the same for every server and every version of its libraries.
-- No second index, and room in each page: so an update writes no index (HOT).
CREATE TABLE volcano.slots (
    project       text COLLATE "C" NOT NULL,
    key           text COLLATE "C" NOT NULL,
    fencing_token bigint NOT NULL,
    changed_at    bigint NOT NULL,
    token         text,     -- of the lease; these three are null together when there is none
    expires_at    bigint,
    hard_deadline bigint,
    PRIMARY KEY (project, key),
    CHECK ((token IS NULL) = (expires_at IS NULL) AND (token IS NULL) = (hard_deadline IS NULL))
) WITH (fillfactor = 60);

-- One row: the highest fencing token of any slot ever swept.
CREATE TABLE volcano.store (
    only_row      integer PRIMARY KEY CHECK (only_row = 1),
    highest_swept bigint NOT NULL
);

INSERT INTO volcano.store (only_row, highest_swept) VALUES (1, 0);

-- How many operations each project has done in a minute, over all replicas.
CREATE TABLE volcano.windows (
    number  bigint NOT NULL,     -- of the minute since 1970
    project text COLLATE "C" NOT NULL,
    used    bigint NOT NULL,
    PRIMARY KEY (number, project)
) WITH (fillfactor = 60);
