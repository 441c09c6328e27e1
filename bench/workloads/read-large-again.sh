# A program on the workstation reads a large file, and then four times again.
#
# S1: directory with large (on the mount)
for reading in 1 2 3 4 5; do
    dd if="$S1/large" of=/dev/null bs=1M 2> "$OUT/dd"
done
tail -c 4096 "$S1/large" > "$OUT/end"
rm "$OUT/dd"
