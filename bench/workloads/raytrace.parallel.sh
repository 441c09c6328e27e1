# By hand, with GNU parallel on the server: the logs are cleaned on all cores, in order.
$SSH "$H1" "$WITH bash -s" > "$OUT/ray.csv" << 'END'
grep '\[RAY\]' "$S1/logs/worker-000.log" | head -n 1 | cut -c 8- > "$S1/rays.csv"
parallel --will-cite -k -n 25 "cat {} | grep '\[RAY\]' | grep -v pathID | cut -c 8-" ::: "$S1"/logs/worker-*.log >> "$S1/rays.csv"
sed -n "/^$RAY,/p" "$S1/rays.csv"
END
