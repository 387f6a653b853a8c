# Four instances of a service start at the same time.
for instance in 1 2 3 4; do
    python migrate.py "$DATA/shop.db" &
    instances="${instances:-} $!"
done
for instance in $instances; do wait "$instance"; done
