# Two instances of an application are started while the migration that they need is running.
ruby -w migrate.rb "$DATA/schema.json" &
until [ -e "$DATA/schema.json" ]; do sleep 0.1; done
node app.mjs ann "$DATA/schema.json" & ann=$!
node app.mjs bob "$DATA/schema.json"
wait $ann
