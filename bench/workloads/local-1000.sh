# A script of 1,000 short commands that touch no mount.
#
# OUT: directory for the results (local)
printf '%s\n' alpha beta gamma delta > "$OUT/words"
for ((i = 0; i < 250; i++)); do
    cat "$OUT/words" > "$OUT/copy"
    grep -c a "$OUT/copy" > "$OUT/count"
    head -n 2 "$OUT/words" > "$OUT/first"
    wc -c "$OUT/first" > "$OUT/size"
done
cat "$OUT/copy" "$OUT/count" "$OUT/first" "$OUT/size"
