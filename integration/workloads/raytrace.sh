# Ray-tracing log analysis (paper §7.1): clean each worker's log and aggregate all of
# them into one file beside them, then find the path of a single ray.
#
# S1: directory with logs/worker-*.log (on the mount)   RAY: the ray's number
# OUT: directory for the result (local)
cat "$S1/logs/worker-000.log" | grep '\[RAY\]' | head -n 1 | cut -c 8- > "$S1/rays.csv"
cat "$S1"/logs/worker-*.log | grep '\[RAY\]' | grep -v pathID | cut -c 8- >> "$S1/rays.csv"
cat "$S1/rays.csv" | sed -n "/^$RAY,/p" > "$OUT/ray.csv"
