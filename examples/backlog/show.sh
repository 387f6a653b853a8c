# Three workers and a backlog of nine. The backlog is the demo's: SQLite behind a little HTTP.
mkfifo "$DATA/stop"
python ../demo/desk.py "$DATA/tickets.db" 9 >"$DATA/url" <"$DATA/stop" &
exec 3>"$DATA/stop"
until [ -s "$DATA/url" ]; do sleep 0.1; done
backlog=$(cat "$DATA/url")

node worker.mjs ann "$backlog" & ann=$!
node worker.mjs bob "$backlog" & bob=$!
node worker.mjs cleo "$backlog"
wait $ann
wait $bob
