# Three replicas; the leader is killed; another takes over once the dead leader's lease is over.
python replica.py ann "$DATA/digest.db" >"$DATA/ann" & ann=$!
until grep -qs leads "$DATA/ann"; do sleep 0.1; done
python replica.py bob "$DATA/digest.db" >"$DATA/others" &
python replica.py cleo "$DATA/digest.db" >>"$DATA/others" &
cat "$DATA/ann"

kill -9 $ann
echo "ann was killed"
until grep -qs leads "$DATA/others"; do sleep 0.1; done
cat "$DATA/others"
