# The second caller comes while the child works; the third when it has finished.
WORK_SECONDS=4 node parent.mjs report:7 >"$DATA/first"
node parent.mjs report:7
until grep -q done "$DATA/first"; do sleep 0.1; done
cat "$DATA/first"
until node parent.mjs report:7 | grep 'handed over'; do sleep 0.1; done
