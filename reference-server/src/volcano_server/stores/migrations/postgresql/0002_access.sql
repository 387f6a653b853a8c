CREATE TABLE volcano.project (
    name       text COLLATE "C" PRIMARY KEY,
    quota      bigint NOT NULL CHECK (quota >= 0),
    created_at bigint NOT NULL                         -- seconds since 1970
);

CREATE TABLE volcano.credential (
    id          text COLLATE "C" PRIMARY KEY,          -- short and not secret, for people
    project     text COLLATE "C" NOT NULL REFERENCES volcano.project (name),
    kind        text NOT NULL CHECK (kind IN ('service', 'anon')),
    permissions text NOT NULL,                         -- separated by spaces
    digest      bytea NOT NULL UNIQUE,                 -- SHA-256 of the key
    created_at  bigint NOT NULL,
    revoked_at  bigint
);

-- One row, whose number rises with each change of the two tables above.
CREATE TABLE volcano.access (
    only_row integer PRIMARY KEY CHECK (only_row = 1),
    version  bigint NOT NULL
);

INSERT INTO volcano.access (only_row, version) VALUES (1, 0);
