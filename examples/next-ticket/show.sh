# Two agents that have nothing to do, and tickets that come one after the other.
mkfifo "$DATA/stop"
python ../demo/desk.py "$DATA/tickets.db" 0 >"$DATA/url" <"$DATA/stop" &
exec 3>"$DATA/stop"
until [ -s "$DATA/url" ]; do sleep 0.1; done
backlog=$(cat "$DATA/url")

python agent.py ann "$backlog" & ann=$!
python agent.py bob "$backlog" & bob=$!
for ticket in 1 2 3 4; do python author.py "$backlog" $ticket; done
until python -c 'import httpx, sys; sys.exit(httpx.get(sys.argv[1], trust_env=False).json() != [])' "$backlog/tickets"; do sleep 0.1; done
kill $ann $bob
wait $ann
wait $bob
