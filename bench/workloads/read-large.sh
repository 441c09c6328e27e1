# A program on the workstation reads a large file from its beginning to its end.
#
# S1: directory with large (on the mount)
dd if="$S1/large" of=/dev/null bs=1M 2> "$OUT/dd"
tail -c 4096 "$S1/large" > "$OUT/end"
rm "$OUT/dd"
