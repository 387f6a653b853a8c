# What cron does on three hosts at two o'clock, and on a fourth whose clock is late.
mkdir -p "$DATA/sales/2026-11-28"
printf 'tea,3\ncoffee,4\n' >"$DATA/sales/2026-11-28/oslo.csv"
printf 'tea,5\n' >"$DATA/sales/2026-11-28/rome.csv"

for host in one two three; do
    ruby -w rollup.rb 2026-11-28 "$DATA/sales" "$DATA/totals.pstore" &
    hosts="${hosts:-} $!"
done
for host in $hosts; do wait "$host"; done
ruby -w rollup.rb 2026-11-28 "$DATA/sales" "$DATA/totals.pstore"
