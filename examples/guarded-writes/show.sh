# The same story on three engines. PostgreSQL and Redis come from packages and live as long as the command.
python show.py sqlite "$DATA/tickets.db"
python engines.py sh -eu -c '
    python show.py postgresql "$DATABASE_URL"
    python show.py redis "$REDIS_URL"
'
