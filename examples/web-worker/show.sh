# Three workers, six jobs for four invoices.
mkdir "$DATA/jobs"
for invoice in 1 1 2 3 3 4; do
    number=$((${number:-0} + 1))
    echo $invoice >"$DATA/jobs/$number.job"
done
ruby -w workers.rb 3 "$DATA/jobs" "$DATA/invoices.pstore"
