# The lock is taken away while the agent waits for a model that takes a minute.
node model.mjs 60 >"$DATA/model" &
until [ -s "$DATA/model" ]; do sleep 0.1; done
node agent.mjs summarise "$(head -n 1 "$DATA/model")" >"$DATA/agent" & agent=$!
until grep -qs begins "$DATA/agent"; do sleep 0.1; done

python -c 'from volcano_sdk import VolcanoClient; VolcanoClient().locks.force_release("task:summarise")'
echo "an operator took the lock away"
status=0
wait $agent || status=$?
cat "$DATA/agent"
until grep 'hung up' "$DATA/model"; do sleep 0.1; done
[ $status = 75 ]
