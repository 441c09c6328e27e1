# A script of 500 short pipelines that touch no mount.
#
# OUT: directory for the results (local)
printf '%s\n' alpha beta gamma delta > "$OUT/words"
for ((i = 0; i < 125; i++)); do
    cat "$OUT/words" | grep -c a > "$OUT/count"
    echo "$i words" | sed 's/words/lines/' > "$OUT/said"
    first=$(head -n 1 "$OUT/words")
    printf '%s\n' b a b | sort | uniq > "$OUT/set"
done
cat "$OUT/count" "$OUT/said" "$OUT/set"
echo "$first"
