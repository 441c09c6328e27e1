# By hand: only the last step's output comes back.
$SSH "$H1" "$WITH bash -s" > "$OUT/ray.csv" << 'END'
cat "$S1/logs/worker-000.log" | grep '\[RAY\]' | head -n 1 | cut -c 8- > "$S1/rays.csv"
cat "$S1"/logs/worker-*.log | grep '\[RAY\]' | grep -v pathID | cut -c 8- >> "$S1/rays.csv"
sed -n "/^$RAY,/p" "$S1/rays.csv"
END
