# A process is killed in the middle of a payout; the next one goes on with it once the dead one's lease is over.
PAUSE_SECONDS=60 python payouts.py "$DATA/accounts.db" "$DATA/state.db" start order-1 >"$DATA/first" & first=$!
until grep -qs holds "$DATA/first"; do sleep 0.1; done
cat "$DATA/first"
kill -9 $first
echo "$first was killed"
python payouts.py "$DATA/accounts.db" "$DATA/state.db" resume
